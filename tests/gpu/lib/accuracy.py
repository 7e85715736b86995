"""Accuracy beside what guessing gives, and how often two runs answer differently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

#: Answers may differ from those given alone this much more often than two runs alone differ.
ALLOWED = 0.01


@dataclass(frozen=True)
class Score:
    """Shares of ``count`` questions: right answers, a random guess, always the commonest answer."""

    right: float
    guess: float
    majority: float
    count: int

    def words(self) -> str:
        return (
            f"{self.right:.1%} of {self.count} (guess {self.guess:.1%}, "
            f"majority {self.majority:.1%})"
        )


def score(given: Sequence[int | str], wanted: Sequence[int | str], choices: int) -> Score:
    """ValueError where nothing was asked, or lengths differ."""
    if not wanted or len(given) != len(wanted):
        raise ValueError(f"{len(given)} answers to {len(wanted)} questions")
    right = sum(one == two for one, two in zip(given, wanted, strict=True)) / len(wanted)
    commonest = Counter(wanted).most_common(1)[0][1] / len(wanted)
    return Score(right, 1 / choices, commonest, len(wanted))


def differing(one: Sequence[object], two: Sequence[object]) -> float:
    """Share of questions that two runs answered differently."""
    if not one or len(one) != len(two):
        raise ValueError(f"{len(one)} answers beside {len(two)}")
    return sum(a != b for a, b in zip(one, two, strict=True)) / len(one)


def as_alone(share: float, repeats: float) -> bool:
    """Whether ``share`` of differing answers is at most a point above that of two runs alone."""
    return share <= repeats + ALLOWED + 1e-9


def as_right(here: int, there: int) -> bool:
    """Whether right answers are as many on both sides, of which these many on one side alone.

    McNemar's test without correction, two-sided at 5 %: the two counts differ by no more than
    1.96 times the root of their sum (https://doi.org/10.1007/BF02295996).
    """
    return abs(here - there) <= 1.96 * (here + there) ** 0.5
