"""A new site is one file, a new release is one line; one command writes what follows from them.

Both are made in a copy of the repository, where the checks must pass without another edit.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import sources

from anchors.drift import documents, update
from anchors.drift.trees import Cache
from anchors.engine.versions import version_key
from anchors.releases import known, wheels
from anchors.sites import all_anchors

from .conftest import CACHE, REPO, release, run

pytestmark = pytest.mark.xdist_group("drift")
OLD, BASE, NATIVE = "0.24.0", "0.29.0", "0.32.0"
NEW = "0.29.9"  # made up: the sources of BASE
LEFT_OUT = shutil.ignore_patterns(".git", ".cache", ".venv", "__pycache__", "sandbox", "results")

SITE = '''\
"""A site of a test: one harmless line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anchors.kit.anchor import (
    ABSENT,
    APPLIES,
    MIXED,
    TWICE,
    Anchor,
    Case,
    Match,
    Values,
    classes,
    exactly_one,
)

if TYPE_CHECKING:
    import libcst as cst

_SOURCE = "class SpeculativeConfig:\\n    pass\\n"


def _find(module: cst.Module) -> Match:
    exactly_one("top-level class SpeculativeConfig", len(classes(module, "SpeculativeConfig")))
    return Match()


def _render(match: Match, values: Values) -> str:
    return "VISION_EXP_SEEN = True"


ANCHORS = (
    Anchor(
        id="harmless",
        file="config/speculative.py",
        where="end of the file",
        what="one line that does nothing",
        why="A test adds it.",
        until="never",
        upstream="none",
        find=_find,
        render=_render,
        cases=(
            Case(APPLIES, _SOURCE),
            Case(ABSENT, "x = 1\\n"),
            Case(TWICE, _SOURCE + _SOURCE),
            Case(MIXED, _SOURCE + "# >>> vision-exp:harmless\\n"),
        ),
    ),
)
'''


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository that knows four releases only, with caches that hold them."""
    base = tmp_path_factory.mktemp("copy")
    shutil.copytree(REPO, base / "repo", ignore=LEFT_OUT)
    for version in (OLD, BASE, NEW, NATIVE):
        like = BASE if version == NEW else version
        place = Cache(base / "cache" / "drift").place(version)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(release(like))
    return base / "repo"


def call(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    cache = copy.parent / "cache"
    kept = {"VISION_EXP_TEST_CACHE": str(cache), "VISION_EXP_CACHE": str(cache / "drift")}
    environment = {**os.environ, **kept, "PYTHONPATH": str(copy)}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)


def lines(copy: Path, edit: re.Pattern[str], text: str) -> None:
    file = copy / "anchors" / "releases" / "known.py"
    source, count = edit.subn(text, file.read_text())
    assert count
    file.write_text(source)


def test_a_site_is_a_file_and_a_release_is_a_line(copy: Path) -> None:
    others = "|".join(re.escape(version) for version in (OLD, BASE, NATIVE))
    lines(copy, re.compile(rf'    Release\("(?!{others}).*\n'), "")  # so that this takes seconds
    (copy / "anchors" / "sites" / "harmless.py").write_text(SITE)
    last = re.compile(rf'(    Release\("{re.escape(BASE)}".*\n)')
    lines(copy, last, rf'\1    Release("{NEW}", WITH_DSPARK),\n')
    assert call(copy, "anchors.drift.update", "--check").returncode == 1
    done = call(copy, "anchors.drift.update")
    assert done.returncode == 0, done.stderr
    done = call(copy, "anchors.drift.update", "--check")
    assert (done.returncode, done.stdout) == (0, "")
    tests = ("anchors/test_cases.py", "anchors/test_architecture.py", "drift/test_matrix.py")
    chosen = "harmless or inventory or architecture or as_expected or would_write"
    files = [f"tests/{name}" for name in tests]
    done = call(copy, "pytest", "-p", "no:cacheprovider", *files, "-k", chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    readme = (copy / "README.md").read_text()
    row = "| `harmless` | `config/speculative.py` | one line that does nothing |"
    assert f"{row} {OLD} to {NEW} |" in (copy / "docs/reference.md").read_text()
    assert f"vLLM {BASE} to {NEW} stops" in readme
    assert call(copy, "anchors.releases.known", "latest").stdout == f"{NEW}\n"


def test_nothing_is_left_to_write() -> None:
    environment = {**os.environ, "VISION_EXP_CACHE": str(CACHE)}
    run(*sources.RELEASES)
    command = [sys.executable, "-m", "anchors.drift.update", "--check"]
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_file_that_only_a_site_reads_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not wheels.needed("vllm/new/place.py")
    kept = sources.folder(BASE)
    (anchor, *_) = all_anchors()
    monkeypatch.setattr(wheels, "all_anchors", lambda: (replace(anchor, file="new/place.py"),))
    wheels.asked.cache_clear()
    try:
        assert wheels.needed("vllm/new/place.py")
        assert sources.folder(BASE) != kept
    finally:
        monkeypatch.undo()
        wheels.asked.cache_clear()


def entry(version: str, verdict: str, dspark: str = "applies") -> dict:
    found = {"id": "dspark-hook", "file": "nvidia/dspark.py", "verdict": dspark}
    return {"tree": version, "verdict": verdict, "error": "", "findings": [found]}


def test_releases_of_the_index_that_fit_get_their_line(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {update.KNOWN: (REPO / update.KNOWN).read_text()}
    monkeypatch.setattr(update, "_read", texts.__getitem__)
    monkeypatch.setattr(update, "_write", texts.__setitem__)
    seen = [entry(version, "applies") for version in known.versions()]
    assert not update._add_lines([*seen, entry("0.98.0", "drifted")])
    new = [
        entry("0.24.1", "applies", "not-applicable"),
        entry("0.29.1", "applies"),
        entry("0.98.0", "drifted"),
        entry("0.99.0", "superseded"),
    ]
    assert update._add_lines([*seen, *new])
    written = types.ModuleType("written")
    monkeypatch.setitem(sys.modules, "written", written)
    exec(texts[update.KNOWN], written.__dict__)
    kinds = {one.version: one.kind for one in written.KNOWN}
    assert list(kinds) == sorted(kinds, key=version_key)
    assert kinds.keys() - set(known.versions()) == {"0.24.1", "0.29.1", "0.99.0"}
    assert [kinds[one] for one in ("0.24.1", "0.29.1", "0.99.0")] == [
        known.WITHOUT_DSPARK,
        known.WITH_DSPARK,
        known.NATIVE,
    ]


@pytest.mark.parametrize(
    ("verdict", "dspark", "said"),
    [
        ("drifted", "applies", "vLLM 0.22.0: it drifted: python3 hotfix.py drift 0.22.0"),
        (
            "applies",
            "applies",
            "vLLM 0.22.0 is 'text-only', and anchors/releases/known.py says "
            "'text-only, without DSpark'",
        ),
        (
            "superseded",
            "superseded",
            "vLLM 0.22.0 is 'native', and anchors/releases/known.py says "
            "'text-only, without DSpark'",
        ),
    ],
)
def test_a_release_that_is_not_as_its_line_says_is_refused(
    verdict: str,
    dspark: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    entries = [entry(version, verdict, dspark) for version in known.versions()]
    monkeypatch.setattr(update.command, "assess_all", lambda named: (entries, []))
    monkeypatch.setattr(update, "_write", lambda *arguments: pytest.fail("something was written"))
    assert update.main([]) == 1
    assert capsys.readouterr().err == f"{said}\nNothing was written.\n"


def test_a_sentence_that_a_document_lost_is_an_error() -> None:
    text = (REPO / "README.md").read_text().replace("stops at one of", "fails at one of")
    with pytest.raises(ValueError, match=r"README\.md has 0 instead of one of: .*documents\.py"):
        documents.rendered("README.md", text, {})
