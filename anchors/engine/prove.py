"""Plan -> VerifiedPlan: everything that can be proven without writing is proven here."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import lru_cache

from anchors.engine import fences
from anchors.engine.locate import locate
from anchors.engine.plan import FilePlan, Plan
from anchors.engine.source import decode
from anchors.errors import refused
from anchors.kit.anchor import Match


@dataclass(frozen=True)
class VerifiedPlan:
    """A plan whose result is known to be right. Only `prove` makes one, and all that is written
    comes from one."""

    plan: Plan


def prove(plan: Plan) -> VerifiedPlan:
    """Proves every file of `plan`. Raises HotfixError (exit 3) naming the proof that failed."""
    for file in plan.files:
        if file.after is not None and not file.current == file.after == file.stock:
            _prove(file)
    return VerifiedPlan(plan)


@lru_cache(maxsize=16)
def _prove(file: FilePlan) -> None:
    after = file.after or b""
    _compiles(file.path, after)
    again = fences.split(after)
    _require(again.stock == file.stock, file, "taking the blocks out gives the original bytes")
    wanted = {state.id for state in file.anchors if state.state != "not-applicable"}
    found = {block.id for block in again.blocks if block.intact}
    # Blocks of retired sites are in the file now and go with the edit.
    _require(found <= wanted, file, "no block but those planned is in the result")
    if file.located is None:
        return
    anchors = tuple(anchor for anchor, _ in file.located.outcomes)
    relocated = dict(locate(file.path, after, anchors).outcomes)
    text = after.split(b"\n")
    for anchor, outcome in file.located.outcomes:
        if not isinstance(outcome, Match) or anchor.render is None:
            continue
        _require(anchor.id in found, file, f"{anchor.id} is in the result")
        second = relocated[anchor]
        _require(isinstance(second, Match), file, f"{anchor.id} is found again in the result")
        if isinstance(second, Match) and second.line is not None:
            closing = f"# <<< vision-exp:{anchor.id}".encode()
            _require(text[second.line - 1].strip() == closing, file, f"{anchor.id} is at its place")


def _compiles(path: str, data: bytes) -> None:
    """Raises HotfixError (exit 3) unless `data` is a Python file this interpreter accepts."""
    decode(path, data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(data, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise refused(
            "result-syntax",
            f"{path} would not compile ({error}). Nothing was changed.",
            hint="python3 hotfix.py diff",
            state="drifted",
        ) from error


def _require(holds: bool, file: FilePlan, claim: str) -> None:
    if not holds:
        raise refused(
            "proof-failed",
            f"{file.path}: cannot prove that {claim}. Nothing was changed.",
            hint="python3 hotfix.py -v status, and report this with the file",
            state="drifted",
        )
