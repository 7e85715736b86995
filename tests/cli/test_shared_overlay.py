"""Two vLLMs, one overlay root: what happens to one never takes the overlay from the other."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import hotfix_rig
import pytest
from hotfix_rig import Answer, Rig, contents

from anchors.engine import fast, staging
from anchors.writing.effects import Effects

RELEASE = "0.25.0"


class Pair:
    """Two vLLMs that share an overlay root."""

    def __init__(self, base: Path) -> None:
        self.one = hotfix_rig.make(base / "one", RELEASE)
        self.two = hotfix_rig.make(base / "two", RELEASE)
        self.root = base / "shared"

    def run(self, rig: Rig, *words: str) -> Answer:
        shared = ["--root", str(rig.root), "--overlay-root", str(self.root)]
        return hotfix_rig.call([*shared, *words], rig.environment)

    def child(self, rig: Rig, verb: str, *, dies_at: tuple[str, str] | None = None) -> int:
        """A process that runs the verb; it vanishes ahead of a step (what, end of the path)."""
        pid = os.fork()
        if pid == 0:
            if dies_at:

                def before_step(effects: Effects, what: str, path: str) -> None:
                    if what == dies_at[0] and path.endswith(dies_at[1]):
                        os._exit(99)

                Effects.before_step = before_step  # type: ignore[method-assign]
            os._exit(self.run(rig, verb).code)
        return pid

    def users(self) -> list[str]:
        return json.loads((self.root / "vision_exp.manifest.json").read_text())["trees"]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_at_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs on both, with a pause where each has read the manifest and not yet written it."""
    original = staging.staged_digest

    def slow(folder: str) -> str | None:
        time.sleep(0.1)
        return original(folder)

    monkeypatch.setattr(staging, "staged_digest", slow)
    both = (pair.one, pair.two)
    for verbs in (("apply", "apply"), ("revert", "apply"), ("apply", "revert")):
        children = [pair.child(rig, verb) for rig, verb in zip(both, verbs, strict=True)]
        assert [code(pid) for pid in children] == [0, 0]
        applied = [rig for rig, verb in zip(both, verbs, strict=True) if verb == "apply"]
        assert pair.users() == sorted(str(rig.root) for rig in applied)
        for rig in applied:
            assert pair.run(rig, "verify").code == 0
    children = [pair.child(rig, "revert") for rig in both]
    assert [code(pid) for pid in children] == [0, 0]
    assert not pair.root.exists()


@pytest.mark.parametrize(
    ("verb", "step"),
    [
        ("apply", ("rename", "/receipt.json")),  # the overlay is in place, the run is not done
        ("revert", ("remove", "/receipt.json")),  # the overlay is away, the run is not done
    ],
)
def test_a_run_that_died_is_undone_around_the_other(
    pair: Pair, verb: str, step: tuple[str, str]
) -> None:
    if verb == "revert":
        assert pair.run(pair.one, "apply").code == 0
    assert code(pair.child(pair.one, verb, dies_at=step)) == 99
    assert pair.run(pair.two, "apply").code == 0
    staged = contents(pair.root / "vision_exp")
    assert pair.run(pair.one, "revert").code == 0
    assert contents(pair.root / "vision_exp") == staged, "taken from the other vLLM"
    assert pair.run(pair.two, "verify").code == 0
    assert pair.run(pair.two, "revert").code == 0
    assert not (pair.root / "vision_exp").exists()
    left = [path for path in pair.root.rglob("*") if path.is_file()]
    assert left == []


def test_a_tree_that_is_listed_and_not_patched_keeps_nothing(pair: Pair) -> None:
    for rig in (pair.one, pair.two):
        assert pair.run(rig, "apply").code == 0
    shutil.rmtree(pair.two.root / ".vision-exp")
    for file in ("models", "transformers_utils", "tokenizers"):
        stock = hotfix_rig.sources.stock(RELEASE) / "vllm" / file
        shutil.copytree(stock, pair.two.root / file, dirs_exist_ok=True)
    assert pair.run(pair.one, "revert").code == 0
    assert not pair.root.exists()


def test_another_build_says_whom_it_leaves_behind(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pair.run(pair.one, "apply").code == 0
    shipped = {**fast.read_shipped(), "new.py": b"NEW = 1\n"}
    monkeypatch.setattr(fast, "read_shipped", lambda: shipped)
    answer = pair.run(pair.two, "apply")
    assert answer.code == 0, answer.err
    assert f"note: {pair.one.root} was patched for another overlay" in answer.out
    assert pair.run(pair.one, "apply").code == 0
    assert pair.run(pair.two, "verify").code == 0


@pytest.mark.parametrize("trees", ["null", "[1]", '"x"', "{}"])
def test_a_manifest_with_malformed_entries(pair: Pair, trees: str) -> None:
    assert pair.run(pair.one, "apply").code == 0
    path = pair.root / "vision_exp.manifest.json"
    path.write_text(f'{{"tool": "vision-exp", "trees": {trees}}}')
    assert pair.run(pair.one, "revert").code == 0
    assert (pair.root / "vision_exp").exists(), "whose it is cannot be told: it stays"
    assert pair.run(pair.two, "apply").code == 0
    assert pair.users() == [str(pair.two.root)]
