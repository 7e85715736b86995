"""The unified diff that apply or revert would write."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from anchors.engine.plan import Plan


@dataclass(frozen=True)
class Diff:
    """`text` is the unified diff, "" where nothing changes; `stat` one line per file."""

    text: str
    stat: str


def make(plan: Plan, *, reverse: bool, context: int) -> Diff:
    """From the bytes as they are to what apply (or revert, with `reverse`) makes of them."""
    chunks = []
    stats = []
    for file in plan.files:
        wanted = file.stock if reverse else file.after
        if file.current is None or wanted is None or file.current == wanted:
            continue
        # Undecodable bytes and carriage returns come through as they are.
        old, new = _lines(file.current), _lines(wanted)
        lines = list(difflib.unified_diff(old, new, f"a/{file.path}", f"b/{file.path}", n=context))
        chunks += [
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in lines
        ]
        added = sum(line.startswith("+") for line in lines) - 1
        removed = sum(line.startswith("-") for line in lines) - 1
        stats.append(f" {file.path} | +{added} -{removed}\n")
    return Diff("".join(chunks), "".join(stats))


def _lines(data: bytes) -> list[str]:
    parts = data.decode("utf-8", "surrogateescape").split("\n")
    return [f"{part}\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])
