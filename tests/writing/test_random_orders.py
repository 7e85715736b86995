"""Random orders of apply, revert, reinstall, upgrade, hand edit, lost notes and kill."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import hotfix_rig
import sources
from hotfix_rig import Answer, contents, identity
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from anchors.engine import fences
from anchors.writing.effects import Effects

RELEASES = ("0.24.0", "0.25.0", "0.29.0")
FILES = (
    "transformers_utils/configs/deepseek_v4.py",
    "models/deepseek_v4/nvidia/model.py",
    "models/deepseek_v4/nvidia/dspark.py",
    "models/deepseek_v4/nvidia/mtp.py",
)
STATE = ".vision-exp"


class Orders(RuleBasedStateMachine):
    """Keeps the bytes that the release and its owner put there; blocks of ours come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Path(tempfile.mkdtemp(prefix="orders-"))
        self.rig = hotfix_rig.Rig(self.base)
        self.rig.home.mkdir()
        self.owned: dict[str, bytes] = {}
        self.edited_inside = False
        self.edited_outside = False
        self.killed = False

    def teardown(self) -> None:
        shutil.rmtree(self.base)

    @initialize(version=st.sampled_from(RELEASES))
    def install(self, version: str) -> None:
        self._install(version)

    @rule()
    def apply(self) -> None:
        before = contents(self.rig.site)
        answer = self.rig.run("apply")
        if answer.code != 0:
            self._check_refusal(answer, before)
            return
        self.killed = self.edited_outside = False
        assert self._without_blocks() == self.owned
        assert self.rig.run("verify").code == 0
        assert self.rig.run("status").code == 0
        assert (self.rig.overlay / "vision_exp" / "install.py").is_file()
        applied = identity(self.base)
        assert self.rig.run("apply").code == 0
        assert identity(self.base) == applied

    @rule()
    def revert(self) -> None:
        before = contents(self.rig.site)
        answer = self.rig.run("revert")
        if answer.code != 0:
            self._check_refusal(answer, before)
            return
        self.killed = self.edited_outside = self.edited_inside = False
        assert self._targets() == self.owned
        assert not (self.rig.root / STATE).exists()
        assert not (self.rig.overlay / "vision_exp").exists()

    @rule(version=st.sampled_from(RELEASES))
    def reinstall_or_upgrade(self, version: str) -> None:
        """As pip does it: the files of the package go and come, what it does not know stays."""
        if self.killed:
            return  # left to the next run of the patcher
        for name in [*self.owned]:
            (self.rig.root / name).unlink()
        for info in self.rig.site.glob("*.dist-info"):
            shutil.rmtree(info)
        self._install(version)

    @rule(name=st.sampled_from(FILES), at_the_end=st.booleans())
    def edit_outside_the_blocks(self, name: str, at_the_end: bool) -> None:
        path = self.rig.root / name
        if self.killed or not path.exists():
            return
        line = b"# a line of the owner's own\n"
        data = path.read_bytes()
        path.write_bytes(data + line if at_the_end else line + data)
        self.owned[name] = fences.split(path.read_bytes()).stock
        self.edited_outside = True

    @rule(name=st.sampled_from(FILES))
    def edit_inside_a_block(self, name: str) -> None:
        path = self.rig.root / name
        opening, mark, rest = (
            path.read_bytes().partition(b">>> vision-exp:") if path.exists() else (b"", b"", b"")
        )
        if self.killed or not mark:
            return
        head, newline, tail = rest.partition(b"\n")
        header, newline, body = tail.partition(b"\n")
        path.write_bytes(opening + mark + head + b"\n" + header + b"\n# changed by hand\n" + body)
        self.edited_inside = True

    @rule()
    def lose_the_notes(self) -> None:
        if not self.killed:
            shutil.rmtree(self.rig.root / STATE, ignore_errors=True)

    @rule(verb=st.sampled_from(["apply", "revert"]), step=st.integers(0, 40))
    def die(self, verb: str, step: int) -> None:
        child = os.fork()
        if child == 0:
            left = step

            def before_step(effects: Effects, what: str, path: str) -> None:
                nonlocal left
                if left == 0:
                    os._exit(99)
                left -= 1

            Effects.before_step = before_step  # type: ignore[method-assign]
            os._exit(self.rig.run(verb).code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        self.killed = self.killed or code == 99
        if verb == "revert" and code == 0:
            self.edited_inside = False

    @rule(verb=st.sampled_from(["status", "diff", "verify", "doctor", "list"]))
    def read(self, verb: str) -> None:
        before = identity(self.base)
        answer = self.rig.run(verb)
        assert answer.code in (0, 1, 3), answer.err
        assert identity(self.base) == before

    @invariant()
    def every_target_is_what_its_owner_left(self) -> None:
        if self.owned:
            assert self._without_blocks() == self.owned

    def _install(self, version: str) -> None:
        sources.install(version, self.rig.site)
        self.owned = self._targets()
        self.edited_inside = self.edited_outside = False

    def _targets(self) -> dict[str, bytes]:
        paths = ((name, self.rig.root / name) for name in FILES)
        return {name: path.read_bytes() for name, path in paths if path.exists()}

    def _without_blocks(self) -> dict[str, bytes]:
        return {name: fences.split(data).stock for name, data in self._targets().items()}

    def _check_refusal(self, answer: Answer, before: dict[str, tuple[int, bytes]]) -> None:
        assert answer.code == 3, answer.err
        assert self.edited_inside or self.edited_outside, answer.err
        if not self.killed:
            assert contents(self.rig.site) == before


Orders.TestCase.settings = settings(
    max_examples=20,
    stateful_step_count=14,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestOrders = Orders.TestCase
