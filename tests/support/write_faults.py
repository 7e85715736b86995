"""Faults ahead of each step that changes the file system, and the worlds before and after."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import hotfix_rig
import pytest
from hotfix_rig import Answer, Rig, contents

from anchors.releases import known
from anchors.writing.effects import Effects

RELEASE = known.versions(known.WITH_DSPARK)[0]  # the smallest model.py among those with all sites
STATE = ".vision-exp"

Fault = Callable[[str, str], None]


class Steps:
    """Counts the steps of runs and lets `fault` happen ahead of step `at`, once or from then on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, str]] = []
        self.at = -1
        self.fault: Fault | None = None
        self.every_later = False
        original = Effects.before_step

        def before_step(effects: Effects, what: str, path: str) -> None:
            number = len(self.seen)
            self.seen.append((what, path))
            due = number >= self.at if self.every_later else number == self.at
            if self.fault and due:
                self.fault(what, path)
            original(effects, what, path)

        patch.setattr(Effects, "before_step", before_step)

    def run(
        self, rig: Rig, verb: str, at: int, fault: Fault, *, every_later: bool = False
    ) -> Answer:
        self.seen, self.at, self.fault, self.every_later = [], at, fault, every_later
        try:
            return rig.run(verb)
        finally:
            self.fault = None


class Worlds:
    """A rig with what it holds before and after `apply`."""

    def __init__(self, base: Path) -> None:
        self.rig = hotfix_rig.make(base, RELEASE)
        self.old = everything(self.rig)
        assert self.rig.run("apply").code == 0
        self.new = everything(self.rig)
        assert self.rig.run("revert").code == 0
        assert everything(self.rig) == self.old

    def start(self, verb: str) -> tuple[dict, dict]:
        """Bring the tree to where `verb` has work to do: (before, after)."""
        if verb == "apply":
            assert self.rig.run("revert").code == 0
            return self.old, self.new
        assert self.rig.run("apply").code == 0
        return self.new, self.old


def everything(rig: Rig) -> dict[str, tuple[int, bytes]]:
    """All files that count; a receipt's time of day does not."""
    return {
        name: ((mode, b"") if name.endswith(("receipt.json", "lock")) else (mode, data))
        for name, (mode, data) in contents(rig.base).items()
    }


def targets(rig: Rig) -> dict[str, tuple[int, bytes]]:
    """The release's own files: what the server would load."""
    found = everything(rig).items()
    return {n: file for n, file in found if n.startswith("site/vllm/") and STATE not in n}


def staged(state: dict[str, tuple[int, bytes]]) -> set[str]:
    """The overlay's files of a state that `everything` gave."""
    return {name for name in state if name.startswith("overlay/vision_exp/")}


def io_error(what: str, path: str) -> None:
    raise OSError(errno.EIO, "Input/output error", path)


def bug(what: str, path: str) -> None:
    raise RuntimeError("a bug of our own")


def terminated(what: str, path: str) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def control_c(what: str, path: str) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def nothing(what: str, path: str) -> None:
    """No fault: the run is only watched."""
