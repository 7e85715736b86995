"""Whether requests that run together get what each gets alone, without a GPU.

Over HTTP every request is one token that lists the log-probabilities of the same tokens (see
answers.distance). Inside the engine the first layer's attention is compared as well, which repeats
itself: nothing before it varies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from gpu.lib.answers import nearest, spread
from gpu.lib.capture import row_error
from gpu.reference.image import KINDS, SENTINEL_FIRST

#: Answers co-batched that may be off: limits are the largest of few, and one may pass them.
MISSES = 2
#: Texts co-batched must be distinguished this well, else co-batching says nothing about images.
DISTINGUISHED_TEXTS = 0.8
#: What the feature off must differ by, in limits of relative error.
FAR = 10.0

Row = Mapping[int, float]


@dataclass(frozen=True)
class Cobatched:
    """Per request: first tokens' log-probabilities of its answers alone, and co-batched."""

    alone: Sequence[Sequence[Row]]
    together: Sequence[Sequence[Row]]

    def moved(self) -> list[float]:
        """Distance of every answer co-batched to the nearest of its own request alone."""
        groups = zip(self.alone, self.together, strict=True)
        return [nearest(row, mine) for mine, rows in groups for row in rows]

    def spread(self) -> float:
        """Largest distance between two answers of one request alone."""
        return max(spread(group) for group in self.alone)

    def own(self) -> int:
        """Answers co-batched that are nearer to their own request's alone than to another's."""
        return sum(
            min(range(len(self.alone)), key=lambda i: nearest(row, self.alone[i])) == index
            for index, rows in enumerate(self.together)
            for row in rows
        )

    def distinguished(self) -> int:
        """Answers alone that are nearer to another of their own request than to any other's."""
        return sum(
            nearest(row, [each for each in group if each is not row]) < self._other(index, row)
            for index, group in enumerate(self.alone)
            for row in group
        )

    def others(self) -> list[float]:
        """Distance of every answer alone to the nearest one of another request."""
        return [self._other(i, row) for i, group in enumerate(self.alone) for row in group]

    def _other(self, index: int, row: Row) -> float:
        return min(nearest(row, each) for i, each in enumerate(self.alone) if i != index)


def assess_cobatched(images: Cobatched, texts: Cobatched) -> tuple[bool, str]:
    """Images co-batched are themselves as surely as texts are, and move no further than those.

    ``texts``: as many requests as ``images``, long enough to vary from run to run. Undecidable, and
    so a failure, where answers alone do not distinguish images, where texts co-batched cannot be
    distinguished, or where another image is within what texts move by.
    """
    count = len(images.moved())
    lone = sum(len(group) for group in images.alone)
    limit = max(*texts.moved(), texts.spread())
    near = sum(moved <= limit for moved in images.moved())
    other = median(images.others())
    needed = min(count - MISSES, texts.own() - MISSES)
    detail = (
        f"nearest to the same image alone: {images.own()} of {count}, {needed} needed (texts "
        f"{texts.own()}); alone {images.distinguished()} of {lone}; {near} answers within "
        f"{limit:.3f}, the most that texts moved in the same batch or alone, the furthest "
        f"{max(images.moved()):.3f}; repeats of an image alone up to {images.spread():.3f} apart, "
        f"another image at {min(images.others()):.3f} or more, {other:.3f} in the middle"
    )
    if images.distinguished() < lone:
        return False, f"undecidable, repeats alone are nearer to another image: {detail}"
    if texts.own() < DISTINGUISHED_TEXTS * len(texts.moved()):
        return False, f"undecidable, texts co-batched are nearer to another text: {detail}"
    if other <= limit:
        return False, f"undecidable, another image is as near as texts move: {detail}"
    return images.own() >= needed and near >= count - MISSES, detail


@dataclass(frozen=True)
class Rows:
    """``values`` (rows, hidden) of one layer for the tokens ``ids`` (rows,), in the same order."""

    values: torch.Tensor
    ids: torch.Tensor


def place(ids: torch.Tensor, part: torch.Tensor) -> slice:
    """Where ``part`` lies in ``ids``. ValueError unless it does so once."""
    windows = ids.unfold(0, len(part), 1) if len(part) <= len(ids) else ids.new_empty(0, len(part))
    found = (windows == part).all(dim=1).nonzero().flatten().tolist()
    if len(found) != 1:
        raise ValueError(f"a prompt of {len(part)} tokens was computed {len(found)} times at once")
    return slice(found[0], found[0] + len(part))


def same_rows(
    alone: Mapping[str, Rows], together: Rows, off: Mapping[str, Rows], limit: float
) -> tuple[bool, str]:
    """Image rows of every prompt are within ``limit`` relative error of those alone.

    ``off``: the same prompts alone with the feature off, whose rows must be far beyond it.
    """
    words, good = [], True
    for name, mine in alone.items():
        image = (mine.ids >= SENTINEL_FIRST) & (mine.ids < SENTINEL_FIRST + len(KINDS))
        here = together.values[place(together.ids, mine.ids)]
        if not torch.equal(off[name].ids, mine.ids):
            raise ValueError(f"{name}: another prompt with the feature off")
        error = _largest(here, mine.values, image)
        rest = _largest(here, mine.values, ~image)
        control = _largest(off[name].values, mine.values, image)
        good = good and error <= limit and rest <= limit and control > FAR * limit
        words.append(
            f"{name}: {int(image.sum())} image rows at most {error:.2g} off, the others {rest:.2g},"
            f" with the feature off {control:.2g}"
        )
    return good, "; ".join(words)


def _largest(one: torch.Tensor, two: torch.Tensor, rows: torch.Tensor) -> float:
    errors = row_error(one[rows], two[rows])
    # A NaN is no small error: max() would let it pass a comparison with the limit inverted.
    return float(errors.nan_to_num(float("inf")).max()) if errors.numel() else 0.0
