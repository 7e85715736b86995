"""Pillow's resize of 8-bit images, as filter coefficients: the same bits, for faster loops.

Pillow resamples one side after the other, each pass rounded to bytes. A value is a sum over `count`
neighbours from `first` on. Their weights, the taps, come from a bicubic curve (a = -0.5), four
source pixels wide, and as much wider as the image shrinks; they are computed in double precision,
normalised, and rounded half away from zero to 22 binary places. The order of operations below is
Pillow's: another order gives other bits. Source, the same in Pillow 9 to 13: `bicubic_filter`,
`precompute_coeffs` and `normalize_coeffs_8bpc` of
https://github.com/python-pillow/Pillow/blob/11.3.0/src/libImaging/Resample.c

Whether an installed Pillow really works like this is tried before it is relied on (backend.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

#: Binary places of the taps (PRECISION_BITS there), and one half of the last place that is kept.
PRECISION = 22
HALF = 1 << (PRECISION - 1)

#: Taps come in groups of this many; the ones added weigh nothing.
GROUP = 4

#: Sides that coefficients are made for; a longer image is Pillow's own work.
LONGEST = 1 << 16


@dataclass(frozen=True)
class FilterCoefficients:
    """One side's filters. ``bounds`` int32 (new, 2): first source pixel and number of taps.
    ``taps`` int32 (new, n), n a multiple of 4: in units of 2 ** -22, unused ones zero."""

    bounds: np.ndarray
    taps: np.ndarray


@lru_cache(maxsize=16)
def filter_coefficients(old: int, new: int) -> FilterCoefficients:
    """The filters for a side of ``old`` pixels that gets ``new``. Do not modify."""
    scale = old / new
    stretch = max(scale, 1.0)
    support = 2.0 * stretch
    size = -(-(math.ceil(support) * 2 + 1) // GROUP) * GROUP
    centre = (np.arange(new) + 0.5) * scale
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    count = np.minimum((centre + support + 0.5).astype(np.int64), old) - first
    tap = np.arange(size)
    weights = _bicubic(((tap + first[:, None]) - centre[:, None] + 0.5) * (1.0 / stretch))
    weights[tap >= count[:, None]] = 0.0
    weights /= np.add.accumulate(weights, axis=1)[:, -1:]  # one after the other, as Pillow adds
    fixed = weights * (1 << PRECISION)
    fixed += np.where(weights < 0, -0.5, 0.5)
    bounds = np.stack([first, count], axis=1).astype(np.int32)
    return FilterCoefficients(bounds, fixed.astype(np.int32))


def fitted_size(size: tuple[int, int], target: tuple[int, int]) -> tuple[int, int]:
    """(width, height) that `ImageOps.pad` resizes to before it pads to ``target``; may have a 0.

    https://github.com/python-pillow/Pillow/blob/11.3.0/src/PIL/ImageOps.py (contain)
    """
    ratio, wanted = size[0] / size[1], target[0] / target[1]
    if ratio > wanted:
        return target[0], round(size[1] / size[0] * target[0])
    if ratio < wanted:
        return round(size[0] / size[1] * target[1]), target[1]
    return target


def vertical_first(old: tuple[int, int], new: tuple[int, int]) -> bool:
    """Whether Pillow 13 takes the vertical pass first; older ones never do."""
    return old[1] - new[1] > max(0, 2 * (old[0] - new[0]))


def _bicubic(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * -0.5
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))
