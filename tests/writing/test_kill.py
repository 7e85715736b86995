"""SIGKILL at random moments of apply and revert; the seed is printed on failure."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import hotfix_rig
import pytest
from hotfix_rig import Rig, contents
from vllm_rig import THOROUGH

from anchors.writing.effects import Effects

RELEASE = "0.25.0"
KILLS = 26 if THOROUGH else 13  # that hit a running process, in each of eight tests
TARGETS = (
    "transformers_utils/configs/deepseek_v4.py",
    "models/deepseek_v4/nvidia/model.py",
    "models/deepseek_v4/nvidia/dspark.py",
    "models/deepseek_v4/nvidia/mtp.py",
)


class Victim:
    """A child process that runs one verb and says when its first change is due."""

    def __init__(self, rig: Rig, verb: str) -> None:
        import libcst  # noqa: F401  (the children must not spend their time importing it)

        self.ready, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            original = Effects.before_step

            def before_step(effects: Effects, what: str, path: str) -> None:
                os.write(writing, b"x")
                original(effects, what, path)

            Effects.before_step = before_step  # type: ignore[method-assign]
            os._exit(rig.run(verb).code)
        os.close(writing)

    def wait_for_first_change(self) -> None:
        os.read(self.ready, 1)

    def kill(self) -> int:
        """SIGKILL it, if it still runs; its exit code."""
        os.kill(self.pid, signal.SIGKILL)
        return self.join()

    def join(self) -> int:
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.ready)
        return code


def tree(rig: Rig) -> dict[str, tuple[int, bytes]]:
    """All files but the patcher's own notes."""
    return {k: v for k, v in contents(rig.base).items() if "/.vision-exp/" not in k}


def durations(rig: Rig, verb: str) -> tuple[float, float]:
    """(seconds until the first change, seconds from there to the end)."""
    start = time.monotonic()
    victim = Victim(rig, verb)
    victim.wait_for_first_change()
    middle = time.monotonic()
    assert victim.join() == 0
    return middle - start, time.monotonic() - middle


@pytest.mark.parametrize("seed", range(8))
def test_sigkill(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    rig = hotfix_rig.make(tmp_path / "rig", RELEASE)
    old = tree(rig)
    times: dict[str, tuple[float, ...]] = {"apply": durations(rig, "apply")}
    new = tree(rig)
    times["revert"] = durations(rig, "revert")
    assert tree(rig) == old
    killed = runs = 0
    while killed < KILLS:
        for verb, before, after in (("apply", old, new), ("revert", new, old)):
            hit = kill_at_random(rig, verb, times[verb], rng)
            killed += hit
            runs += 1
            if not hit:  # the machine is quicker now than when the times were taken
                times[verb] = tuple(seconds * 0.8 for seconds in times[verb])
            check_between(rig, before, after)
            finish = rig.run(verb)
            assert finish.code == 0, finish.err
            assert tree(rig) == after
            if verb == "revert":
                assert contents(rig.base) == old, "something is left behind"
    assert runs < 4 * KILLS, "most runs ended before the signal"


def kill_at_random(rig: Rig, verb: str, times: tuple[float, ...], rng: random.Random) -> bool:
    """Kill a run of `verb` at a random moment, mostly while it writes; whether that hit it."""
    reading, writing = times
    victim = Victim(rig, verb)
    if rng.random() < 0.75:
        victim.wait_for_first_change()
        time.sleep(rng.uniform(0, writing))
    else:
        time.sleep(rng.uniform(0, reading))
    return victim.kill() == -signal.SIGKILL


def check_between(rig: Rig, before: dict, after: dict) -> None:
    """No torn file; a tree between old and new calls itself interrupted."""
    now = tree(rig)
    for name in TARGETS:
        path = f"site/vllm/{name}"
        assert now[path] in (before[path], after[path]), f"{name} is torn"
    status = rig.run("--json", "status")
    assert status.json["state"] in ("pristine", "applied", "interrupted")
    assert tree(rig) == now, "status wrote something"
    if status.json["state"] != "interrupted":
        targets = [{n: world[f"site/vllm/{n}"] for n in TARGETS} for world in (before, after)]
        assert {n: now[f"site/vllm/{n}"] for n in TARGETS} in targets
