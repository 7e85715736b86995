"""The lists of faults in bench/mutants; bench/mutants.py says how a line is written."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
LISTS = REPO / "bench" / "mutants"


@dataclass
class Fault:
    """One change of one file; `old` occurs in it once. `tests` are pytest's arguments."""

    room: str
    file: str
    seen: str
    tests: tuple[str, ...]
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    equivalent: str = ""

    @property
    def mark(self) -> str:
        """What tells this fault, with its tests as they are named now, from every other one."""
        return hashlib.sha256(
            repr((self.file, self.tests, self.old, self.new)).encode()
        ).hexdigest()[:8]

    def change(self, source: str) -> str:
        """`source` with the fault in it. Raises ValueError unless its place is there once."""
        old, new = "\n".join(self.old), "\n".join(self.new)
        if not old or source.count(old) != 1:
            raise ValueError(f"{self.file} has {source.count(old)} times: {old!r} ({self.seen})")
        return source.replace(old, new)


def read(rooms: Sequence[str] = ()) -> list[Fault]:
    """The faults of the named rooms, of all without any. Raises ValueError for a malformed line."""
    found: list[Fault] = []
    for path in sorted(LISTS.glob("*.txt")):
        if not rooms or path.stem in rooms:
            found += parse(path.stem, path.read_text(encoding="utf-8"))
    return found


def parse(room: str, text: str) -> list[Fault]:
    """The faults of one list."""
    found: list[Fault] = []
    file, tests, own = "", "", ""
    for number, line in enumerate(text.splitlines(), 1):
        mark, rest = line[:1], line[2:]
        if mark == "@":
            file, _, tests = (part.strip() for part in rest.partition("|"))
        elif mark == "!":
            own = rest
        elif mark == "#":
            found.append(Fault(room, file, rest, tuple(shlex.split(own or tests))))
            own = ""
        elif mark == "-" and found:
            found[-1].old.append(rest)
        elif mark == "+" and found:
            found[-1].new.append(rest)
        elif mark == "=" and found:
            found[-1].equivalent = rest
        elif line.strip():
            raise ValueError(f"{room}.txt, line {number}: {line!r}")
    return found
