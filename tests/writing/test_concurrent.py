"""Somebody else writes at the same time: another run of this tool, or whoever edits the tree."""

from __future__ import annotations

import os

import pytest
from write_faults import Steps, Worlds, everything

from anchors.writing import lock
from anchors.writing.effects import Effects


def test_target_that_changes_between_plan_and_write(steps: Steps, worlds: Worlds) -> None:
    worlds.start("apply")
    mtp = worlds.rig.root / "models/deepseek_v4/nvidia/mtp.py"
    stock = mtp.read_bytes()

    def edit(what: str, path: str) -> None:
        mtp.write_bytes(stock + b"# somebody else\n")

    answer = steps.run(worlds.rig, "apply", 0, edit)
    assert answer.code in (3, 4, 6)
    assert "mtp.py" in answer.err
    now = everything(worlds.rig)
    assert now.pop("site/vllm/models/deepseek_v4/nvidia/mtp.py")[1].endswith(b"# somebody else\n")
    assert now.items() <= worlds.old.items()
    mtp.write_bytes(stock)


def test_second_run_waits_for_the_first_and_gives_up(
    monkeypatch: pytest.MonkeyPatch, worlds: Worlds
) -> None:
    worlds.start("apply")
    holding, release = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        original = Effects.before_step

        def before_step(effects: Effects, what: str, path: str) -> None:
            original(effects, what, path)
            if what == "rename":
                os.write(holding[1], b"x")
                os.read(release[0], 1)

        Effects.before_step = before_step  # type: ignore[method-assign]
        os.close(release[1])
        os._exit(worlds.rig.run("apply").code)
    try:
        os.close(release[0])
        os.read(holding[0], 1)
        with monkeypatch.context() as patch:
            patch.setattr(lock.locked.__wrapped__, "__defaults__", (0.3,))  # type: ignore[attr-defined]
            answer = worlds.rig.run("apply")
        assert answer.code == 6
        assert "another run" in answer.cause
        assert "next:" in answer.err
    finally:
        os.close(release[1])
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for end in (*holding,):
            os.close(end)
    assert everything(worlds.rig) == worlds.new


def test_runs_at_once(worlds: Worlds) -> None:
    worlds.start("apply")
    for verbs, finals in (
        (["apply"] * 4, [worlds.new]),
        (["apply", "revert"] * 2, [worlds.new, worlds.old]),
        (["revert"] * 3, [worlds.old]),
    ):
        children = []
        for verb in verbs:
            child = os.fork()
            if child == 0:
                os._exit(worlds.rig.run(verb).code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert codes == [0] * len(verbs)
        assert everything(worlds.rig) in finals
