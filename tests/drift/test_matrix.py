"""The matrix of today's real releases is the committed one; bad input does not spoil the rest."""

from __future__ import annotations

import json
import shutil
import time
import zipfile
from pathlib import Path

import pytest
import sources

from anchors.drift import causes
from anchors.drift.trees import Cache, Tree
from anchors.engine import requirements
from anchors.engine.boundaries import BOUNDARIES

from .conftest import CACHE, REPO, needs, release, run

pytestmark = pytest.mark.xdist_group("drift")
EXPECTED = json.loads((Path(__file__).parent / "expected.json").read_text())


def words(result: dict) -> dict[str, dict[str, str]]:
    """tree -> column -> verdict."""
    return {entry["tree"]: causes.row(entry) for entry in result["trees"]}


def tree(version: str) -> Tree:
    """A release as drift reads it."""
    release(version)
    return Cache(CACHE).tree(version)


def test_todays_releases_are_as_expected() -> None:
    code, result = run(*sources.RELEASES)
    assert list(EXPECTED) == list(sources.RELEASES)
    assert words(result) == EXPECTED
    assert code == (1 if any("drifted" in row.values() for row in EXPECTED.values()) else 0)


def test_facts_place_every_release_between_its_boundaries() -> None:
    """By content alone, each release is asked for what its number says."""
    entries = needs()
    for version in sources.TEXT_ONLY:
        own = tuple(map(int, version.split(".")))
        asked = set(requirements.holding(entries, tree(version).read))
        for entry in entries:
            edge = BOUNDARIES[entry.place - 1]
            newer = own >= tuple(map(int, edge.first.split(".")))
            wanted = not entry.word or newer == (entry.word == "since")
            assert (entry in asked) == wanted, (version, entry.text)


def test_without_arguments_every_release_of_the_index_newest_last() -> None:
    _, result = run()
    labels = [entry["tree"] for entry in result["trees"]]
    assert labels == sorted(labels, key=lambda v: [int(x) for x in v.split(".")])
    assert set(sources.RELEASES) <= set(labels)
    assert not [label for label in labels if label.startswith("0.21.")]


def test_verdicts_of_releases_come_from_the_cache() -> None:
    run(*sources.RELEASES)
    begin = time.monotonic()
    run(*sources.RELEASES)
    # The figure of the benchmark, with room for a busy machine; judging anew takes longer.
    assert time.monotonic() - begin < 5


def test_without_an_index_the_cache_answers_and_says_so() -> None:
    release("0.29.0")
    code, result = run(PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_EXTRA_INDEX_URL="")
    assert "the package index did not answer" in result["notes"][0]
    assert "0.29.0" in [entry["tree"] for entry in result["trees"]]


def test_without_index_and_cache_it_is_an_environment_error(tmp_path: Path) -> None:
    code, result = run(
        cache=tmp_path, PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_EXTRA_INDEX_URL=""
    )
    assert code == 6
    assert result["error"]["reference"] == "no-index"
    assert "Nothing was judged" in result["error"]["message"]


def whole_wheel(folder: Path, version: str) -> Path:
    """A wheel file with a release's needed members."""
    path = folder / f"vllm-{version}-py3-none-any.whl"
    root = release(version)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for file in sorted(root.rglob("*")):
            if file.is_file():
                archive.write(file, file.relative_to(root))
    return path


def test_bad_input_gets_a_line_and_the_others_are_judged(tmp_path: Path) -> None:
    good = whole_wheel(tmp_path, "0.29.0")
    content = good.read_bytes()
    truncated = tmp_path / "truncated.whl"
    truncated.write_bytes(content[: len(content) // 2])
    damaged = tmp_path / "damaged.whl"
    damaged.write_bytes(content[:2000] + bytes(4000) + content[6000:])
    text = tmp_path / "text.whl"
    text.write_text("not a wheel")
    other = tmp_path / "other"
    (other / "vllm").mkdir(parents=True)
    (other / "vllm" / "__init__.py").touch()
    empty = tmp_path / "empty"
    empty.mkdir()
    asked = {
        str(truncated): "not a readable wheel",
        str(damaged): "not a readable wheel",
        str(text): "not a readable wheel",
        str(other): "a vLLM without models/deepseek_v4",
        str(empty): "no vLLM package in it",
        str(tmp_path / "absent"): "no such file, folder or version",
        "0.999.0": "lists no wheel of vllm 0.999.0",
        str(good): "",
    }
    code, result = run(*asked)
    assert code == 1
    assert [entry["tree"] for entry in result["trees"]] == list(asked)
    for entry, reason in zip(result["trees"], asked.values(), strict=True):
        assert reason in entry["error"]
        assert bool(reason) == bool(entry["error"])
    assert words(result)[str(good)] == EXPECTED["0.29.0"]


def test_a_checkout_is_judged_by_its_package_folder(tmp_path: Path) -> None:
    checkout = tmp_path / "fork"
    shutil.copytree(release("0.27.1"), checkout)
    (checkout / ".git").mkdir()
    named = [str(checkout), str(checkout / "vllm")]
    _, result = run(*named)
    assert words(result) == dict.fromkeys(named, EXPECTED["0.27.1"])


def test_verified_json_is_what_a_run_would_write() -> None:
    from anchors.drift import command

    _, result = run(*sources.RELEASES)
    committed = (REPO / "anchors" / "verified.json").read_text()
    assert json.loads(command.verified(result["trees"])) == json.loads(committed)


def test_the_cache_is_ignored_by_git() -> None:
    assert CACHE.is_relative_to(sources.CACHE.parent)
