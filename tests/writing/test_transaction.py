"""Whatever goes wrong while writing: the tree is all-old or all-new, and the next run finishes.

Faults are put in front of each step that changes the file system, one at a time.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hotfix_rig import Answer
from write_faults import (
    Fault,
    Steps,
    Worlds,
    bug,
    control_c,
    everything,
    io_error,
    nothing,
    staged,
    targets,
    terminated,
)

from anchors.engine import assess as engine
from anchors.writing import journal
from anchors.writing.effects import Effects


def worth_trying(steps: Steps, worlds: Worlds, verb: str) -> list[int]:
    """Numbers of the steps of `verb`; of the overlay's many files the first, second and last."""
    worlds.start(verb)
    assert steps.run(worlds.rig, verb, -1, nothing).code == 0
    package = [i for i, (what, path) in enumerate(steps.seen) if "vision_exp.new-" in path]
    package = [i for i in package if steps.seen[i][0] == "write"]
    return sorted({*range(len(steps.seen))} - {*package[2:-1]})


def numbered(steps: Steps, worlds: Worlds, wanted: Callable[[str, str], bool]) -> list[int]:
    """Numbers of the steps of `apply` that are wanted; the tree is ready for one again."""
    worlds.start("apply")
    assert steps.run(worlds.rig, "apply", -1, nothing).code == 0
    found = [number for number, step in enumerate(steps.seen) if wanted(*step)]
    worlds.start("apply")  # its revert counts steps as well
    return found


def every_step(steps: Steps, worlds: Worlds, verb: str, fault: Fault, check: Callable) -> None:
    """Run `verb` with the fault ahead of each step in turn; then the next run must finish."""
    numbers = worth_trying(steps, worlds, verb)
    assert len(numbers) > 8
    for at in numbers:
        before, after = worlds.start(verb)
        answer = steps.run(worlds.rig, verb, at, fault)
        check(answer, f"{at}: {steps.seen[at]}", before, after)
        assert worlds.rig.run(verb).code == 0, f"step {at}: the next {verb} does not finish"
        assert everything(worlds.rig) == after, f"step {at}"


@pytest.mark.parametrize("fault", [io_error, bug])
@pytest.mark.parametrize("verb", ["apply", "revert"])
def test_failure_at_every_step(steps: Steps, worlds: Worlds, verb: str, fault: Fault) -> None:
    def check(answer: Answer, step: str, before: dict, after: dict) -> None:
        now = everything(worlds.rig)
        if answer.code == 0:  # the work was done: only tidying up failed
            assert now == after, step
            return
        assert answer.code in (4, 6), (step, answer.err)
        assert now == before, step
        assert answer.cause
        assert "next:" in answer.err
        # A fault of our own is reported with its traceback; the disk's is not ours to trace.
        assert ("Traceback" in answer.err) == (fault is bug)

    every_step(steps, worlds, verb, fault, check)


@pytest.mark.parametrize(
    ("verb", "fault"), [("apply", terminated), ("revert", terminated), ("revert", control_c)]
)
def test_signal_at_every_step(steps: Steps, worlds: Worlds, verb: str, fault: Fault) -> None:
    def check(answer: Answer, step: str, before: dict, after: dict) -> None:
        if answer.code == 0:  # too late to stop: the work was done
            assert everything(worlds.rig) == after, step
            return
        assert answer.code == 130, (step, answer.err)
        assert "interrupted" in answer.cause.lower()
        assert everything(worlds.rig) == before, step

    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    every_step(steps, worlds, verb, fault, check)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers


@pytest.mark.parametrize("verb", ["apply", "revert"])
def test_rollback_that_fails_is_loud_and_is_finished_by_the_next_run(
    steps: Steps, worlds: Worlds, verb: str
) -> None:
    codes = set()
    for at in worth_trying(steps, worlds, verb):
        before, after = worlds.start(verb)
        answer = steps.run(worlds.rig, verb, at, io_error, every_later=True)
        codes.add(answer.code)
        now = everything(worlds.rig)
        as_before = now.items() >= before.items() and staged(now) == staged(before)
        assert answer.code == 0 or (answer.code == 5) == (not as_before), answer.err
        if answer.code == 5:
            assert "Do not start this vLLM" in answer.cause
            assert ".py" in answer.err, "the files are not listed"
            assert "next:" in answer.err
        elif answer.code == 0:  # the work was done: only tidying up failed
            assert targets(worlds.rig).items() <= after.items()
        else:  # at most what was laid beside the targets is still there
            assert answer.code in (4, 6), (at, answer.err)
            assert "Do not start" not in answer.err
            assert as_before, f"{at}: {steps.seen[at]}"
        assert worlds.rig.run(verb).code == 0
        assert everything(worlds.rig) == after
    assert {4, 5} <= codes


def test_a_disk_that_fails_for_good_before_anything_was_replaced(
    steps: Steps, worlds: Worlds
) -> None:
    """Nothing of this vLLM was touched: that is exit 4, not an unknown state."""
    first = numbered(steps, worlds, lambda what, path: path.endswith(".py"))[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "unlink", lambda path: io_error("unlink", path))
        answer = steps.run(worlds.rig, "apply", first, io_error, every_later=True)
    assert answer.code == 4, answer.err
    assert "this vLLM is as it was" in answer.cause
    assert everything(worlds.rig).items() >= worlds.old.items()
    assert worlds.rig.run("status").code == 1
    assert worlds.rig.run("apply").code == 0
    assert everything(worlds.rig) == worlds.new


def test_a_lock_that_cannot_be_cleared_away_does_not_hide_how_the_run_went(
    steps: Steps, worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that turns read-only in the middle takes the rollback and the lock's removal."""
    renames = numbered(steps, worlds, lambda what, path: path.endswith("mtp.py"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", lambda path: io_error("unlink", path))
        answer = steps.run(worlds.rig, "apply", renames[-1], io_error, every_later=True)
    assert answer.code == 5, answer.err
    assert "Do not start this vLLM" in answer.cause
    assert worlds.rig.run("apply").code == 0
    assert everything(worlds.rig) == worlds.new


def test_a_bug_while_rolling_back_is_not_called_rolled_back(
    steps: Steps, worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = numbered(steps, worlds, lambda what, path: what == "rename")[-1]
    with monkeypatch.context() as patch:
        patch.setattr(journal, "_restore", lambda *_: {}["a bug of our own"])
        answer = steps.run(worlds.rig, "apply", last, io_error)
    assert answer.code == 5, answer.err
    assert "do not start this vLLM" in answer.cause
    assert "rolled back; this" not in answer.err.lower()
    assert worlds.rig.run("apply").code == 0
    assert everything(worlds.rig) == worlds.new


@pytest.mark.parametrize(
    "error", [KeyError("x"), OSError(errno.EIO, "bad disk"), KeyboardInterrupt]
)
def test_an_error_after_everything_was_written_says_that_it_was(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    worlds.start("apply")
    original, calls = engine.assess, 0

    def assess(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise error
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "assess", assess)
    answer = worlds.rig.run("apply")
    assert answer.code == 1
    assert "All was written" in answer.cause
    assert "nothing was changed" not in answer.err.lower()
    assert everything(worlds.rig) == worlds.new


@pytest.mark.parametrize("verb", ["apply", "revert"])
def test_bytes_that_change_on_their_way_to_the_disk(
    monkeypatch: pytest.MonkeyPatch, worlds: Worlds, verb: str
) -> None:
    """Each file is read back after it was put in place."""
    original = Effects.rename
    count = 0
    at = 0

    def rename(effects: Effects, old: str, new: str) -> None:
        nonlocal count
        if new.endswith(".py"):
            if count == at:
                with Path(old).open("ab") as file:
                    file.write(b"\0")
            count += 1
        original(effects, old, new)

    while True:
        before, after = worlds.start(verb)
        count = 0
        with monkeypatch.context() as patch:
            patch.setattr(Effects, "rename", rename)
            answer = worlds.rig.run(verb)
        if count <= at:
            break
        assert answer.code == 4, f"rename {at}"
        assert everything(worlds.rig) == before
        at += 1
    assert answer.code == 0
    assert everything(worlds.rig) == after
    assert at >= 4
