"""What the validator concludes, and when two answers count as the same.

A flag is True, False, or None: what the server's own noise does not let anybody judge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vision_exp.validate_reply import Answer

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"

#: Two greedy answers may part where the two tokens were this close (nats): other company in a
#: batch rounds differently. Anything wider is a different computation.
NEAR_TIE = 0.5

#: A server's noise is the largest movement of some 18 pairs of repeats: of the pairs that are
#: judged then, one in 19 moves further by chance, so only twice that is held against it.
MARGIN = 2.0


@dataclass(frozen=True)
class Verdict:
    """``compared`` says what was held against what; nothing beyond that was judged."""

    state: str
    compared: str
    detail: str


def verdict(good: bool | None, compared: str, detail: str) -> Verdict:
    """None becomes skipped: it was compared, and nothing could be concluded."""
    return Verdict({True: PASSED, False: FAILED, None: SKIPPED}[good], compared, detail)


def both(*flags: bool | None) -> bool | None:
    """False if one is False, else None if one is None."""
    return False if False in flags else None if None in flags else True


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


def judge(left: Answer, right: Answer, noise: float) -> tuple[bool | None, str]:
    """`same`, but None where they part by no more than ``MARGIN`` times the server's noise (nats).

    ``noise`` is what `movement` measures on repeats of single requests. Where repeats move by more
    than a near tie, a token can leave the alternatives that a server tells, so that answers which
    cannot be compared are not judged either.
    """
    good, words = same(left, right)
    if good:
        return True, words
    moved = movement(left, right)
    if moved <= MARGIN * noise or (math.isinf(moved) and noise > NEAR_TIE):
        return None, f"{words}, not judged: repeated alone, answers move by {noise:.2f}"
    return False, words


def movement(left: Answer, right: Answer) -> float:
    """How far the difference of two tokens' log-probabilities moved, up to where answers part.

    0 for answers that agree in everything; infinite for other texts that cannot be compared.
    """
    moved = 0.0
    for mine, other in zip(left.tokens, right.tokens, strict=False):
        change = [mine[token] - other[token] for token in mine if token in other]
        first, second = next(iter(mine)), next(iter(other))
        if first != second and not (second in mine and first in other):
            return math.inf
        moved = max(moved, max(change) - min(change))
        if first != second:
            return moved
    return moved if left.text == right.text else math.inf


def all_same(pairs: list[tuple[Answer, Answer]], compared: str, noise: float = 0.0) -> Verdict:
    """Every pair the same; the detail counts equal texts and tells of the others.

    Pairs within the server's own noise are not judged, and the verdict says how many were.
    """
    found = [judge(left, right, noise) for left, right in pairs]
    equal = sum(note == "equal text" for _, note in found)
    others = [note for _, note in found if note != "equal text"]
    detail = "; ".join([f"{equal} of {len(pairs)} texts equal", *others[:3]])
    judged = [good for good, _ in found if good is not None]
    if len(judged) < len(pairs):
        compared += f" ({len(judged)} of {len(pairs)} could be judged)"
    return verdict(all(judged) if judged else None, compared, detail)


def slope(true: list[float], told: list[float]) -> float:
    """Least-squares slope of the told positions over the true ones."""
    middle_true, middle_told = sum(true) / len(true), sum(told) / len(told)
    spread = sum((t - middle_true) ** 2 for t in true)
    return (
        sum((t - middle_true) * (a - middle_told) for t, a in zip(true, told, strict=True)) / spread
    )
