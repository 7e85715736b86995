"""RGB pixels to bfloat16 patches: the plain way, and a fast one with the same bits.

The plain way is Pillow's resize and pad, then numpy and torch. The fast one (pixel_kernels.py)
reads the decoded picture some rows at a time, resamples them as Pillow would, and writes each
finished band straight to its patches: no resized, padded or widened picture is ever made.

A process gets the fast way by `warm`, at its start: compiling takes seconds, too much for a
request. `warm` compares both ways on small pictures, bit by bit. Where they differ (a Pillow that
resamples otherwise) or numba is missing, the plain way stays, and the log says so once. So it does,
without a word, with VISION_EXP_FAST_PIXELS=0.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from vision_exp.image import raw as raw_pixels
from vision_exp.image import resample

SWITCH = "VISION_EXP_FAST_PIXELS"

logger = logging.getLogger("vllm.vision_exp")

_SLOWER = "[vision-exp] pictures are %s by Pillow, which is slower: %s"

_GREY = (127, 127, 127)
_GREY_PIXEL = 0x7F7F7F
_GREY_VALUE = (127 / 255 - 0.5) / 0.5

#: The side of a patch that the fast way is compiled for.
_PATCH = 14

#: Bytes of a picture that are resized at once. More of them cost memory; fewer make a thread wait
#: for the GIL more often, which takes milliseconds each time while another thread runs Python.
_BLOCK = 2 << 20

#: Bytes that Pillow copies out at once, at most: from about here on, glibc's allocator asks the
#: system for fresh pages each time (its M_MMAP_THRESHOLD), which costs more than the copying.
_PIECE = 120_000

#: Values that the plain way puts in order and widens at once: floats that stay in the cache.
_RUN = 1 << 18

_MINUS_ONE = torch.tensor(-1.0)

#: Pictures that both ways are compared on: (width, height), grid (h, w), stretched. Smaller and
#: larger, odd and even margins, and both sides of where Pillow 13 changes the order of its passes.
_PROBES = (
    ((61, 47), (2, 2), False),
    ((61, 47), (3, 2), False),
    ((9, 5), (3, 5), False),
    ((5, 9), (4, 3), False),
    ((1, 1), (2, 3), False),
    ((100, 73), (5, 4), False),
    ((90, 11), (1, 3), True),
    ((150, 18), (2, 12), True),
    ((38, 62), (1, 1), True),
    ((38, 63), (1, 1), True),
    ((14, 29), (2, 1), True),
    ((33, 130), (3, 3), False),
    ((31, 400), (2, 1), False),
    ((640, 480), (12, 17), False),
)


@dataclass(frozen=True)
class Way:
    """How pixels are prepared. ``kernels``: pixel_kernels, None for the plain way;
    ``resamples``: whether they resample too; ``vertical_first``: whether Pillow ever does so."""

    kernels: Any = None
    resamples: bool = False
    vertical_first: bool = False


PLAIN = Way()

_way = PLAIN
_warm = False
_torn = False  # this process was forked while another thread was compiling
_lock = threading.Lock()


def warm() -> Way:
    """Compile and check the fast way, once per process. Call it before any picture comes in."""
    global _way, _warm
    with _lock:
        if not _warm:
            _way, _warm = _find_way(), True
    return _way


def _in_a_forked_process() -> None:
    """Whoever was compiling when this process was forked is not in it: nobody would let go of our
    lock, nor of numba's or the import's."""
    global _lock, _torn
    _torn = _torn or (_lock.locked() and not _warm)
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_in_a_forked_process)


def patches_of(
    image: Image.Image,
    grid: tuple[int, int],
    patch: int,
    *,
    stretch: bool = False,
    way: Way | None = None,
) -> torch.Tensor:
    """RGB picture of any size to bfloat16 (h * w, 3, patch, patch) for a ``grid`` (h, w).

    It is fitted and centred on grey, or stretched. ``way``: this process's, if not given. Raises
    ValueError for what Pillow refuses to resize.
    """
    way = way or _way
    with pillow_errors("decoded"):
        image.load()
        # Pixels and size that belong together, whatever another thread does to the picture: the
        # loops do not look where they write.
        image = Image.Image()._new(image.im)
    target = (grid[1] * patch, grid[0] * patch)
    fast = way.kernels is not None and patch == _PATCH
    if image.size != target:
        size = target if stretch else resample.fitted_size(image.size, target)
        longest = max(*image.size, *target)
        if fast and way.resamples and min(size) > 0 and longest <= resample.LONGEST:
            return _centred(way, _resized(way, image, size), size, grid)
        with pillow_errors("resized"):
            image = image.resize(target) if stretch else ImageOps.pad(image, target, color=_GREY)
    return _placed(way, image, grid) if fast else _plain(image, grid, patch)


@contextmanager
def pillow_errors(what: str) -> Iterator[None]:
    """Turn whatever Pillow raises on a picture into a ValueError with the reason."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise ValueError(f"the picture cannot be {what}: {reason}") from error


def _find_way() -> Way:
    if os.environ.get(SWITCH) == "0":
        return PLAIN
    if _torn:
        logger.warning(_SLOWER, "prepared", "this process was forked while its parent compiled")
        return PLAIN
    try:
        from vision_exp.image import kernels as pixel_kernels
    except Exception as error:  # noqa: BLE001  whatever keeps it from compiling, bits are the same
        logger.warning(_SLOWER, "prepared", f"{type(error).__name__}: {error}")
        return PLAIN
    values = np.arange(28 * 28 * 3, dtype=np.uint32).astype(np.uint8).reshape(28, 28, 3)
    placing = Way(pixel_kernels)
    ways = [Way(pixel_kernels, True, vertical_first) for vertical_first in (False, True)]
    try:
        shades = Image.fromarray(values)
        raw = b"".join(raw_pixels.pieces(shades, "RGB", 5))
        if not _same(placing, shades, (2, 2)) or raw != shades.tobytes():
            logger.warning(_SLOWER, "prepared", "compiled loops give other bits here")
            return PLAIN
        for way in ways:
            if all(_same(way, _noise(*size), grid, how) for size, grid, how in _PROBES):
                return way
    except Exception as error:  # noqa: BLE001  a Pillow whose encoder is called in another way
        logger.warning(_SLOWER, "prepared", f"{type(error).__name__}: {error}")
        return PLAIN
    logger.warning(_SLOWER, "resized", "this Pillow resamples in another way")
    return placing


def _same(way: Way, image: Image.Image, grid: tuple[int, int], stretch: bool = False) -> bool:
    ours, plain = (
        patches_of(image, grid, _PATCH, stretch=stretch, way=one).view(torch.int16)
        for one in (way, PLAIN)
    )
    return torch.equal(ours, plain)


def _noise(width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(width)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))


def _rows(image: Image.Image, unit: int) -> Iterator[np.ndarray]:
    """The picture's rows from the top, a few at a time, as uint32 (n, width), read-only.

    n is a multiple of ``unit`` but at the end. By pieces: Pillow's own calls copy the whole picture
    first, and a `crop` for each piece costs more than the copying.
    """
    count = raw_pixels.rows_in(_PIECE, image.width * 4, unit)
    for piece in raw_pixels.pieces(image, "RGBX", count):
        yield np.frombuffer(piece, np.uint32).reshape(-1, image.width)


def _blocks(image: Image.Image, unit: int) -> Iterator[np.ndarray]:
    """The same in large blocks, each overwritten by the next, as are those of what follows."""
    most = min(raw_pixels.rows_in(_BLOCK, image.width * 4, unit), image.height)
    block = np.empty((most, image.width), np.uint32)
    flat, width = block.reshape(-1).data, image.width
    filled = 0
    for rows in _rows(image, 1):
        while len(rows):
            some = rows[: most - filled]
            # Not by numpy, which would let go of the GIL for each copy.
            flat[filled * width :][: some.size] = some.reshape(-1).data
            filled += len(some)
            rows = rows[len(some) :]
            if filled == most:
                yield block
                filled = 0
    if filled:
        yield block[:filled]


def _resized(way: Way, image: Image.Image, size: tuple[int, int]) -> Iterator[np.ndarray]:
    """The rows of the picture resized to ``size``."""
    across, down = resample.table(image.width, size[0]), resample.table(image.height, size[1])
    rows = _blocks(image, way.kernels.STRIPE)
    if way.vertical_first and resample.vertical_first(image.size, size):
        return _across(way, _down(way, rows, down, image.width), across, image.width)
    return _down(way, _across(way, rows, across, image.width), down, size[0])


def _across(
    way: Way, blocks: Iterable[np.ndarray], table: resample.Table, width: int
) -> Iterator[np.ndarray]:
    """Rows of ``width`` resampled horizontally."""
    lines = way.kernels.STRIPE
    # Fours of taps may reach past the last pixel: what is there weighs nothing.
    stripe = np.zeros((width + resample.GROUP, lines), np.uint32)
    out = np.empty((0, len(table.spans)), np.uint32)
    for rows in blocks:
        if len(out) < len(rows):
            out = np.empty((-(-len(rows) // lines) * lines, len(table.spans)), np.uint32)
        way.kernels.across(rows, table.spans, table.weights, stripe, out)
        yield out[: len(rows)]


def _down(
    way: Way, blocks: Iterable[np.ndarray], table: resample.Table, width: int
) -> Iterator[np.ndarray]:
    """Rows of ``width`` resampled vertically."""
    ring = np.zeros((table.weights.shape[1], width), np.uint32)
    needed = table.spans.sum(axis=1)  # source rows that each row of the result waits for
    taken = done = 0
    for rows in blocks:
        ready = int(np.searchsorted(needed, taken + len(rows), side="right"))
        out = np.empty((ready - done, width), np.uint32)
        way.kernels.down(rows, taken, done, table.spans, table.weights, ring, out)
        yield out
        taken += len(rows)
        done = ready


def _centred(
    way: Way, blocks: Iterable[np.ndarray], size: tuple[int, int], grid: tuple[int, int]
) -> torch.Tensor:
    """Patches of the rows of a picture of ``size``, in the middle of grey."""
    width, height = grid[1] * _PATCH, grid[0] * _PATCH
    left, top = round((width - size[0]) / 2), round((height - size[1]) / 2)
    out, values = _empty(grid)
    band = np.full((_PATCH, width), _GREY_PIXEL, np.uint32)
    out[: top // _PATCH * grid[1]] = _GREY_VALUE
    for rows in blocks:
        way.kernels.place(rows, top, left, band, values)
        top += len(rows)
    if top % _PATCH:
        rows = np.full((_PATCH - top % _PATCH, width), _GREY_PIXEL, np.uint32)
        way.kernels.place(rows, top, 0, band, values)
        top += len(rows)
    out[top // _PATCH * grid[1] :] = _GREY_VALUE
    return out


def _placed(way: Way, image: Image.Image, grid: tuple[int, int]) -> torch.Tensor:
    """Patches of a picture of just the size of ``grid``."""
    out, values = _empty(grid)
    first = 0
    for rows in _rows(image, _PATCH):
        way.kernels.place_bands(rows, first, values)
        first += len(rows) // _PATCH
    return out


def _empty(grid: tuple[int, int]) -> tuple[torch.Tensor, np.ndarray]:
    """Patches to be filled, and their memory in the shape that the compiled loops take."""
    height, width = grid
    out = torch.empty((height * width, 3, _PATCH, _PATCH), dtype=torch.bfloat16)
    values = out.view(torch.int16).numpy().view(np.uint16)
    return out, values.reshape(height, width * 3, _PATCH * _PATCH)


def _plain(image: Image.Image, grid: tuple[int, int], patch: int) -> torch.Tensor:
    """RGB image of ``grid`` patches to bfloat16 (h * w, 3, patch, patch).

    Some rows of patches at a time, through two buffers that are filled again and again: fresh
    memory costs more than the arithmetic where the allocator has to ask the system for it.
    """
    height, width = grid
    rows = max(1, min(height, _RUN // (width * 3 * patch * patch)))
    # A patch's row of one channel is one item of `patch` bytes, which numpy moves whole.
    ordered = np.empty((rows, width, 3, patch), dtype=f"V{patch}")
    values = torch.from_numpy(ordered.view(np.uint8).reshape(rows, -1))
    wide = torch.empty(values.shape)
    out = torch.empty((height, values.shape[1]), dtype=torch.bfloat16)
    bands = [
        np.frombuffer(image.tobytes("raw", name), ordered.dtype).reshape(height, patch, width)
        for name in "RGB"
    ]
    for top in range(0, height, rows):
        part = out[top : top + rows]
        for channel, band in enumerate(bands):
            ordered[: len(part), :, channel] = band[top : top + rows].transpose(0, 2, 1)
        floats = wide[: len(part)].copy_(values[: len(part)])
        part.copy_(torch.add(_MINUS_ONE, floats, alpha=1 / 127.5, out=floats))
    return out.view(height * width, 3, patch, patch)
