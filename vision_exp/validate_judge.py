"""What the validator concludes, and when two answers count as the same."""

from __future__ import annotations

from dataclasses import dataclass

from vision_exp.validate_client import Answer

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"

#: Two greedy answers may part where the two tokens were this close (nats): other company in a
#: batch rounds differently. Anything wider is a different computation.
NEAR_TIE = 0.5


@dataclass(frozen=True)
class Verdict:
    """``compared`` says what was held against what; nothing beyond that was judged."""

    state: str
    compared: str
    detail: str


def verdict(good: bool, compared: str, detail: str) -> Verdict:
    return Verdict(PASSED if good else FAILED, compared, detail)


def skipped(compared: str, why: str) -> Verdict:
    return Verdict(SKIPPED, compared, why)


def same(left: Answer, right: Answer) -> tuple[bool, str]:
    """Whether two greedy answers are the same, near ties apart; and in words how they compare."""
    if left.text == right.text:
        return True, "equal text"
    for index, (mine, other) in enumerate(zip(left.tokens, right.tokens, strict=False)):
        first, second = next(iter(mine)), next(iter(other))
        if first == second:
            continue
        gaps = [abs(t[first] - t[second]) for t in (mine, other) if first in t and second in t]
        words = f"token {index} {first!r} or {second!r}"
        if not gaps:
            return False, f"{words}, not among each other's alternatives"
        return max(gaps) <= NEAR_TIE, f"{words}, {max(gaps):.2f} nats apart"
    return False, f"{left.text!r} is not {right.text!r}"


def all_same(pairs: list[tuple[Answer, Answer]], compared: str) -> Verdict:
    """Every pair the same; the detail counts equal texts and tells of the others."""
    found = [same(left, right) for left, right in pairs]
    equal = sum(note == "equal text" for _, note in found)
    others = [note for _, note in found if note != "equal text"]
    detail = "; ".join([f"{equal} of {len(pairs)} texts equal", *others[:3]])
    return verdict(all(good for good, _ in found), compared, detail)


def slope(true: list[float], told: list[float]) -> float:
    """Least-squares slope of the told positions over the true ones."""
    middle_true, middle_told = sum(true) / len(true), sum(told) / len(told)
    spread = sum((t - middle_true) ** 2 for t in true)
    return (
        sum((t - middle_true) * (a - middle_told) for t, a in zip(true, told, strict=True)) / spread
    )
