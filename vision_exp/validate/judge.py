"""When two answers count as the same, and what is concluded from that.

An answer is held against several to the same request, asked alone and cold. It is wrong (False) if
the lower bound of its distance to all of them is beyond `Noise.limit`, right (True) if it is not
and the answers to another image are. It is not judged (None) if those are as near, so that a wrong
answer would not be distinguishable, or if there is too little to compare.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from vision_exp.validate.client import Answer

#: Answers of one computation may move this far (nats) even where repeats alone do not: other
#: requests in a batch round differently. Two tokens half a nat apart, and then the other way round.
FLOOR = 1.0
#: A server's noise is the largest movement of some 15 repeats, which one in 15 answers exceeds by
#: chance: only twice that is held against one.
MARGIN = 2.0
#: Tokens this far (nats) below the likeliest are not looked at: their chances are rounding.
LIKELY = 4.0
#: What probabilities of all tokens may be short of, or beyond, one in a server's arithmetic.
ROUNDING = 1e-6
Good = bool | None


class Verdict(NamedTuple):
    """``compared``: what was held against what; nothing beyond that was judged. None: skipped."""

    good: Good
    compared: str
    detail: str


def both(*flags: Good) -> Good:
    """False if one is False, else None if one is None."""
    return False if False in flags else None if None in flags else True


class Distance(NamedTuple):
    """``nats`` is infinite for answers that cannot be compared; of those only a bound is known."""

    nats: float
    lower_bound: float

    def __str__(self) -> str:
        least = "" if math.isfinite(self.nats) else " or more"
        known = math.isfinite(self.lower_bound)
        return f"is {self.lower_bound:.2f} nats{least} from" if known else "shares nothing with"


SAME, INCOMPARABLE = Distance(0.0, 0.0), Distance(math.inf, math.inf)


def distance(left: Answer, right: Answer) -> Distance:
    """How far a likely token's log-probability, or the difference of two, moved until they part."""
    moved = 0.0
    for mine, other in zip(left.tokens, right.tokens, strict=False):
        first, second = next(iter(mine)), next(iter(other))
        if first != second and not (second in mine and first in other):
            there = mine[first] - mine.get(second, _unlisted(mine))
            return Distance(math.inf, there + other[second] - other.get(first, _unlisted(other)))
        least = max(*mine.values(), *other.values()) - LIKELY
        likely = [t for t in mine.keys() & other.keys() if max(mine[t], other[t]) >= least]
        change = [0.0, *(mine[t] - other[t] for t in likely)]
        moved = max(moved, max(change) - min(change))
        if first != second:
            return Distance(moved, moved)
    return Distance(moved, moved) if left.texts == right.texts else INCOMPARABLE


def _unlisted(listed: dict[str, float]) -> float:
    """The most that another token's log-probability can be: the last one's, or what those leave.

    Where they lie close together, as with random weights, others at the top may be mere noise.
    """
    left = 1 - sum(math.exp(min(chance, 0)) for chance in listed.values())
    return min(math.log(max(left, ROUNDING)), *listed.values())


def nearest(answer: Answer, group: list[Answer]) -> Distance:
    """To the nearest of a group; of none that can be compared, the least lower bound."""
    return min((distance(answer, each) for each in group), default=INCOMPARABLE)


@dataclass(frozen=True)
class Noise:
    """How far, in nats, answers to one request asked alone are from the nearest of their repeats.

    ``incomparable`` of them share nothing with any other: then that proves nothing of an answer.
    """

    moved: float = 0.0
    incomparable: int = 0
    repeats: int = 0

    @property
    def limit(self) -> float:
        """Nats beyond which an answer is another one."""
        return max(FLOOR, MARGIN * self.moved)

    def __add__(self, other: "Noise") -> "Noise":
        counts = self.incomparable + other.incomparable, self.repeats + other.repeats
        return Noise(max(self.moved, other.moved), *counts)


def noise_of(*groups: list[Answer]) -> Noise:
    """Of answers to one request in each group; none is known of less than two."""
    rest = [(a, g[:i] + g[i + 1 :]) for g in groups if len(g) > 1 for i, a in enumerate(g)]
    found = [nearest(answer, others).nats for answer, others in rest]
    finite = [nats for nats in found if math.isfinite(nats)]
    return Noise(max(finite, default=0.0), len(found) - len(finite), len(found))


class Reference(NamedTuple):
    """Answers to one request asked alone, and to ``what`` else: the same with another image."""

    alone: list[Answer]
    others: list[Answer]
    what: str = "another image"


Pair = tuple[Answer, Reference]


def judge(answer: Answer, reference: Reference, noise: Noise) -> tuple[Good, str]:
    """Whether an answer is the reference's, and why; ``noise`` is the repeats' and any known."""
    if not any(any((*each.texts, each.tokens)) for each in (answer, *reference.alone)):
        return None, "empty answers without log-probabilities prove nothing"
    moved = nearest(answer, reference.alone)
    control = min((nearest(each, reference.alone) for each in reference.others), default=SAME)
    own = f"but so do {noise.incomparable} of {noise.repeats} repeats of one request alone"
    words = f"{answer.text!r} {moved} {reference.alone[0].text!r} as asked alone"
    other, limit = f"an answer to {reference.what} {control} it", f"limit {noise.limit:.2f}"
    hidden = f"a wrong answer would not be distinguishable: {other}"
    if noise.incomparable and math.isinf(moved.nats):
        return None, f"{words}, {own}"
    if math.isinf(moved.nats) or moved.lower_bound > noise.limit:
        return False if moved.lower_bound > noise.limit else None, f"{words}, {limit}"
    if noise.incomparable and math.isinf(control.nats):
        return None, f"{hidden}, {own}"
    if control.lower_bound <= noise.limit:
        return None, f"{hidden}, {limit}"
    return True, f"{words}, {other}, {limit}"


def all_same(pairs: list[Pair], known: Noise) -> tuple[Good, str]:
    """True only if every answer was judged, and right; ``known``: noise of other requests."""
    known += noise_of(*(reference.alone for _, reference in pairs))
    found = [judge(answer, reference, known) for answer, reference in pairs]
    good, judged = both(*(good for good, _ in found)), sum(each is not None for each, _ in found)
    equal = sum(any(a.texts) and a.texts in {b.texts for b in r.alone} for a, r in pairs)
    words = [f"{equal} of {len(pairs)} texts equal"]
    words += [f"only {judged} of {len(pairs)} could be judged"] if judged < len(pairs) else []
    words += list(dict.fromkeys(text for each, text in found if each is good))[:3]
    return good, "; ".join(words)
