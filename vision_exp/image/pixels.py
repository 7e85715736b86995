"""RGB pixels to bfloat16 patches: with Pillow, or with compiled loops that give the same bits.

Pillow's way is its resize and pad, then numpy. The loops (kernels.py) read the decoded
image some rows at a time, resample them as Pillow would, and write each finished band straight to
its patches: no resized, padded or widened image is ever made. backend.py says which of them this
process may use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from vision_exp.image import raw, resample
from vision_exp.image.resample import FilterCoefficients

Rows = Iterator[np.ndarray]  # pixels of some rows at a time, uint32 (n, width)

#: The side of a patch that the loops are compiled for: a constant, so that they have no end to
#: look for.
PATCH = 14

_GREY = (127, 127, 127)
_GREY_PIXEL = 0x7F7F7F
_GREY_VALUE = (127 / 255 - 0.5) / 0.5

#: Bytes of an image that are resized at once. More of them cost memory; fewer make a thread wait
#: for the GIL more often, which takes milliseconds each time while another thread runs Python.
_BLOCK = 2 << 20

#: Bytes that Pillow copies out at once, at most: from about here on, glibc's allocator asks the
#: system for fresh pages each time (M_MMAP_THRESHOLD, 128 KiB), which costs more than the copying.
#: https://man7.org/linux/man-pages/man3/mallopt.3.html
_PIECE = 120_000

#: Bits of the bfloat16 of each byte, by the reference's formula (see transform.py).
_BFLOAT16 = ((torch.arange(256) / 255 - 0.5) / 0.5).to(torch.bfloat16).view(torch.int16).numpy()


@dataclass(frozen=True)
class ResizeBackend:
    """How pixels are prepared. ``kernels``: the module of the loops, None for Pillow's way;
    ``resamples``: whether they resample too; ``vertical_first``: whether Pillow ever does so."""

    kernels: Any = None
    resamples: bool = False
    vertical_first: bool = False


PILLOW = ResizeBackend()


def patches_of(
    image: Image.Image,
    grid: tuple[int, int],
    patch: int,
    backend: ResizeBackend,
    *,
    stretch: bool = False,
) -> torch.Tensor:
    """RGB image of any size to bfloat16 (h * w, 3, patch, patch) for a ``grid`` (h, w).

    It is fitted and centred on grey, or stretched. Raises ValueError for what Pillow refuses to
    decode or resize.
    """
    with pillow_errors("decoded"):
        image.load()
        # Pixels and size that belong together, whatever another thread does to the image: the
        # loops do not look where they write.
        image = Image.Image()._new(image.im)
    target = (grid[1] * patch, grid[0] * patch)
    compiled = backend.kernels is not None and patch == PATCH
    if image.size != target:
        size = target if stretch else resample.fitted_size(image.size, target)
        longest = max(*image.size, *target)
        if compiled and backend.resamples and min(size) > 0 and longest <= resample.LONGEST:
            return _packed(backend, _resized(backend, image, size), size, grid)
        with pillow_errors("resized"):
            image = image.resize(target) if stretch else ImageOps.pad(image, target, color=_GREY)
    return _packed(backend, _rows(image), target, grid) if compiled else _plain(image, grid, patch)


@contextmanager
def pillow_errors(what: str) -> Iterator[None]:
    """Turn whatever Pillow raises on an image into a ValueError with the reason."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise ValueError(f"the image cannot be {what}: {reason}") from error


def _rows(image: Image.Image) -> Rows:
    """The image's rows from the top, a few at a time, read-only.

    By pieces: Pillow's own calls copy the whole image first, and a `crop` for each piece costs
    more than the copying.
    """
    for piece in raw.pieces(image, "RGBX", raw.rows_in(_PIECE, image.width * 4)):
        yield np.frombuffer(piece, np.uint32).reshape(-1, image.width)


def _blocks(image: Image.Image, unit: int) -> Rows:
    """The same in large blocks, each overwritten by the next, as are those of what follows.

    Their rows are a multiple of ``unit`` but at the end.
    """
    most = min(raw.rows_in(_BLOCK, image.width * 4, unit), image.height)
    block = np.empty((most, image.width), np.uint32)
    flat, width = block.reshape(-1).data, image.width
    filled = 0
    for rows in _rows(image):
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


def _resized(backend: ResizeBackend, image: Image.Image, size: tuple[int, int]) -> Rows:
    """The rows of the image resized to ``size``, one side after the other."""
    across, down = map(resample.filter_coefficients, image.size, size)
    rows = _blocks(image, backend.kernels.TILE)
    if backend.vertical_first and resample.vertical_first(image.size, size):
        rows = _vertical_pass(backend, rows, down, image.width)
        return _horizontal_pass(backend, rows, across, image.width)
    rows = _horizontal_pass(backend, rows, across, image.width)
    return _vertical_pass(backend, rows, down, size[0])


def _horizontal_pass(
    backend: ResizeBackend, blocks: Rows, filters: FilterCoefficients, width: int
) -> Rows:
    """Rows of ``width`` resampled horizontally."""
    height = backend.kernels.TILE
    # Groups of taps may reach past the last pixel: what is there weighs nothing.
    tile = np.zeros((width + resample.GROUP, height), np.uint32)
    out = np.empty((0, len(filters.bounds)), np.uint32)
    for rows in blocks:
        if len(out) < len(rows):
            out = np.empty((-(-len(rows) // height) * height, len(filters.bounds)), np.uint32)
        backend.kernels.horizontal_pass(rows, filters.bounds, filters.taps, tile, out)
        yield out[: len(rows)]


def _vertical_pass(
    backend: ResizeBackend, blocks: Rows, filters: FilterCoefficients, width: int
) -> Rows:
    """Rows of ``width`` resampled vertically."""
    ring = np.zeros((filters.taps.shape[1], width), np.uint32)
    needed = filters.bounds.sum(axis=1)  # source rows that each row of the result waits for
    taken = done = 0
    for rows in blocks:
        ready = int(np.searchsorted(needed, taken + len(rows), side="right"))
        out = np.empty((ready - done, width), np.uint32)
        backend.kernels.vertical_pass(rows, taken, done, filters.bounds, filters.taps, ring, out)
        yield out
        taken += len(rows)
        done = ready


def _packed(
    backend: ResizeBackend, blocks: Rows, size: tuple[int, int], grid: tuple[int, int]
) -> torch.Tensor:
    """Patches of the rows of an image of ``size``, in the middle of grey."""
    height, width = grid[0] * PATCH, grid[1] * PATCH
    left, top = round((width - size[0]) / 2), round((height - size[1]) / 2)
    out = torch.empty((grid[0] * grid[1], 3, PATCH, PATCH), dtype=torch.bfloat16)
    # The same memory in the shape and type that the loops take.
    values = out.view(torch.int16).numpy().view(np.uint16).reshape(grid[0], grid[1] * 3, -1)
    band = np.full((PATCH, width), _GREY_PIXEL, np.uint32)
    out[: top // PATCH * grid[1]] = _GREY_VALUE
    for rows in blocks:
        backend.kernels.pack_patches(rows, top, left, band, values)
        top += len(rows)
    if top % PATCH:
        rows = np.full((PATCH - top % PATCH, width), _GREY_PIXEL, np.uint32)
        backend.kernels.pack_patches(rows, top, 0, band, values)
        top += len(rows)
    out[top // PATCH * grid[1] :] = _GREY_VALUE
    return out


def _plain(image: Image.Image, grid: tuple[int, int], patch: int) -> torch.Tensor:
    """RGB image of ``grid`` patches to bfloat16 (h * w, 3, patch, patch), without the loops."""
    height, width = grid
    pixels = np.asarray(image).reshape(height, patch, width, patch, 3).transpose(0, 2, 4, 1, 3)
    bits = np.take(_BFLOAT16, np.ascontiguousarray(pixels))
    return torch.from_numpy(bits).view(torch.bfloat16).view(height * width, 3, patch, patch)
