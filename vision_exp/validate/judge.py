"""What the validator concludes, and when two answers count as the same.

An answer is held against several answers to the same request, asked alone and cold. It is

- wrong (False) if it is for certain further from all of them than `Noise.limit`;
- right (True) if it is not, and the answers to another picture are;
- not judged (None) if those are as near, so that a wrong answer could not be told, or if there is
  too little to compare.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from vision_exp.validate.reply import Answer

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"

#: Answers of one computation may move this far (nats) even where repeats alone do not: other
#: company in a batch rounds differently. Two tokens half a nat apart, and then the other way round.
FLOOR = 1.0

#: A server's noise is the largest movement of some 15 repeats: of the answers that are judged then,
#: one in 15 moves further by chance, so only twice that is held against it.
MARGIN = 2.0

#: Tokens this far (nats) below the likeliest are not looked at: their chances are rounding.
LIKELY = 4.0

#: What probabilities of all tokens may be short of, or beyond, one in a server's arithmetic.
ROUNDING = 1e-6


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


@dataclass(frozen=True)
class Noise:
    """How far answers to one request, asked alone, are from the nearest of their repeats.

    ``moved``: the largest finite distance in nats. ``lost`` of ``repeats`` answers share nothing
    that could be compared with any other: then such a distance proves nothing about this server.
    """

    moved: float = 0.0
    lost: int = 0
    repeats: int = 0

    @property
    def limit(self) -> float:
        """Nats beyond which an answer is another one."""
        return max(FLOOR, MARGIN * self.moved)

    def __add__(self, other: Noise) -> Noise:
        return Noise(
            max(self.moved, other.moved), self.lost + other.lost, self.repeats + other.repeats
        )

    def __str__(self) -> str:
        lost = f", {self.lost} of {self.repeats} beyond comparison" if self.lost else ""
        return f"{self.moved:.2f} nats{lost}"


@dataclass(frozen=True)
class Reference:
    """Answers to one request asked alone, and to ``what`` else: the same with another picture."""

    alone: list[Answer]
    others: list[Answer]
    what: str = "another picture"

    @property
    def noise(self) -> Noise:
        return noise_of(self.alone)


@dataclass(frozen=True)
class Finding:
    """One answer judged: ``moved`` is its distance in nats, ``control`` another picture's."""

    good: bool | None
    words: str
    moved: float = 0.0
    control: float = math.inf


def noise_of(repeats: list[Answer]) -> Noise:
    """Of answers to one request; none is known of less than two."""
    if len(repeats) < 2:
        return Noise()
    found = [
        nearest(answer, [*repeats[:index], *repeats[index + 1 :]])
        for index, answer in enumerate(repeats)
    ]
    finite = [distance for distance in found if math.isfinite(distance)]
    return Noise(max(finite, default=0.0), len(found) - len(finite), len(found))


def nearest(answer: Answer, group: list[Answer]) -> float:
    """Distance to the nearest of a group in nats; infinite where none can be compared."""
    return min((movement(answer, each) for each in group), default=math.inf)


def movement(left: Answer, right: Answer) -> float:
    """How far a likely token's log-probability, or the difference of two, moved, in nats.

    Up to and with the token at which the answers part. 0 for answers that agree in everything;
    infinite for other texts that cannot be compared.
    """
    moved = 0.0
    for mine, other in zip(left.tokens, right.tokens, strict=False):
        first, second = next(iter(mine)), next(iter(other))
        if first != second and not (second in mine and first in other):
            return math.inf
        moved = max(moved, _spread(mine, other))
        if first != second:
            return moved
    return moved if left.said == right.said else math.inf


def least_movement(left: Answer, right: Answer) -> float:
    """What `movement` is at least where it is infinite: infinite only without alternatives.

    A token that is not listed is no likelier than the last one that is, nor than what the listed
    ones leave. Where those lie close together, as with random weights, other tokens at the top may
    be mere noise.
    """
    for mine, other in zip(left.tokens, right.tokens, strict=False):
        first, second = next(iter(mine)), next(iter(other))
        if first != second:
            there = mine[first] - mine.get(second, _unlisted(mine))
            return there + other[second] - other.get(first, _unlisted(other))
    return math.inf


def _unlisted(listed: dict[str, float]) -> float:
    """The highest log-probability that a token which is not listed can have."""
    left = 1 - sum(math.exp(min(chance, 0)) for chance in listed.values())
    return min(math.log(max(left, ROUNDING)), *listed.values())


def _spread(mine: dict[str, float], other: dict[str, float]) -> float:
    least = max(*mine.values(), *other.values()) - LIKELY
    shared = mine.keys() & other.keys()
    change = [mine[t] - other[t] for t in shared if max(mine[t], other[t]) >= least]
    return max(0.0, *change) - min(0.0, *change) if change else 0.0


def judge(answer: Answer, reference: Reference, noise: Noise) -> Finding:
    """Whether an answer is the reference's, None where that cannot be told; and in words.

    ``noise``: of this server, from the reference's repeats and any others that are known.
    """
    if answer.empty and all(each.empty for each in reference.alone):
        return Finding(None, "empty answers without log-probabilities prove nothing")
    moved = nearest(answer, reference.alone)
    control = min((nearest(each, reference.alone) for each in reference.others), default=0.0)
    least = _least(answer, reference) if math.isinf(moved) else moved
    told = control
    if math.isinf(control):
        told = min(_least(each, reference) for each in reference.others)
    words = f"{answer.text!r} {_away(moved)} {reference.alone[0].text!r} as asked alone"
    other = f"an answer to {reference.what} {_away(control)} it"
    own = f"but so do {noise.lost} of {noise.repeats} repeats of one request alone"
    limit = f"limit {noise.limit:.2f}"
    if noise.lost and math.isinf(moved):
        return Finding(None, f"{words}, {own}", moved, control)
    if least > noise.limit:
        return Finding(False, f"{words}, {limit}", moved, control)
    if math.isinf(moved):
        close = f"though not by more than {least:.2f} nats for certain, {limit}"
        return Finding(None, f"{words}, {close}", moved, control)
    if noise.lost and math.isinf(control):
        return Finding(None, f"a wrong answer could not be told: {other}, {own}", moved, control)
    if told <= noise.limit:
        surely = f", {told:.2f} nats for certain" if told < control else ""
        words = f"a wrong answer could not be told: {other}{surely}, {limit}"
        return Finding(None, words, moved, control)
    return Finding(True, words, moved, control)


def _least(answer: Answer, reference: Reference) -> float:
    return min(least_movement(answer, each) for each in reference.alone)


def _away(distance: float) -> str:
    return "shares nothing with" if math.isinf(distance) else f"is {distance:.2f} nats from"


def all_same(pairs: list[tuple[Answer, Reference]], known: Noise) -> tuple[bool | None, str]:
    """True only if every answer was judged, and right; and in words, with the counts.

    ``known``: the server's noise from other requests; the references' own comes on top.
    """
    for _, reference in pairs:
        known += reference.noise
    found = [judge(answer, reference, known) for answer, reference in pairs]
    equal = sum(
        not answer.empty and any(answer.said == each.said for each in reference.alone)
        for answer, reference in pairs
    )
    judged = [finding for finding in found if finding.good is not None]
    words = [f"{equal} of {len(pairs)} texts equal"]
    if len(judged) < len(pairs):
        words.append(f"only {len(judged)} of {len(pairs)} could be judged")
    words += list(dict.fromkeys(finding.words for finding in found if not finding.good))[:3]
    if judged and all(finding.good for finding in judged):
        moved = max(finding.moved for finding in judged)
        control = min(finding.control for finding in judged)
        words.append(f"at most {moved:.2f} nats from the same request alone")
        other = f"an answer to {pairs[0][1].what} {_away(control)} it"
        words.append(f"limit {known.limit:.2f}; {other}")
    return both(*(finding.good for finding in found)), "; ".join(words)


def slope(true: list[float], told: list[float]) -> float:
    """Least-squares slope of the told positions over the true ones."""
    middle_true, middle_told = sum(true) / len(true), sum(told) / len(told)
    spread = sum((t - middle_true) ** 2 for t in true)
    return (
        sum((t - middle_true) * (a - middle_told) for t, a in zip(true, told, strict=True)) / spread
    )
