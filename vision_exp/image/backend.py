"""Which backend resizes and packs the images of this process: compiled loops, or Pillow.

A process gets the compiled loops by `warm_up`, at its start: compiling takes seconds, too much for
a request. `warm_up` compares them with Pillow on small images, bit by bit. Where they differ (a
Pillow that resamples otherwise) or numba is missing, Pillow does the work, and the log says so
once. So it does, without a word, with VISION_EXP_FAST_PIXELS=0.
"""

from __future__ import annotations

import logging
import os
import threading

import numpy as np
import torch
from PIL import Image

from vision_exp import settings
from vision_exp.image import raw
from vision_exp.image.pixels import PATCH, PILLOW, ResizeBackend, patches_of

logger = logging.getLogger("vllm.vision_exp")

_SLOWER = "[vision-exp] images are %s by Pillow, which is slower: %s"

#: Images that both backends are compared on: (width, height), grid (h, w), stretched. Smaller and
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

_backend: ResizeBackend | None = None
_forked_while_compiling = False  # by another thread of the parent
_lock = threading.Lock()


def warm_up() -> ResizeBackend:
    """Compile and check the loops, once per process. Call it before any image comes in."""
    global _backend
    with _lock:
        if _backend is None:
            _backend = select_backend()
    return _backend


def current_backend() -> ResizeBackend:
    """The backend of this process: Pillow's before `warm_up`."""
    return _backend or PILLOW


def _after_fork() -> None:
    """Whoever was compiling when this process was forked is not in it: nobody would let go of our
    lock, nor of numba's or the import's."""
    global _lock, _forked_while_compiling
    _forked_while_compiling |= _lock.locked() and _backend is None
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def select_backend() -> ResizeBackend:
    """The fastest backend that gives Pillow's bits here; the log says why if loops are missing."""
    if not settings.FAST_PIXELS.is_on():
        return PILLOW
    if _forked_while_compiling:
        return _pillow_because("this process was forked while its parent compiled")
    try:
        from vision_exp.image import kernels

        packing = ResizeBackend(kernels)
        if not _packs(packing):
            return _pillow_because("compiled loops give other bits here")
        for vertical_first in (False, True):
            backend = ResizeBackend(kernels, True, vertical_first)
            if all(_same_bits(backend, _noise(*size), grid, how) for size, grid, how in _PROBES):
                return backend
    except Exception as error:  # noqa: BLE001  numba that does not compile, Pillow called otherwise
        return _pillow_because(f"{type(error).__name__}: {error}")
    logger.warning(_SLOWER, "resized", "this Pillow resamples in another way")
    return packing


def _pillow_because(reason: str) -> ResizeBackend:
    logger.warning(_SLOWER, "prepared", reason)
    return PILLOW


def _packs(backend: ResizeBackend) -> bool:
    """Whether all byte values are read and packed right, where nothing is resized."""
    side = 2 * PATCH
    values = np.arange(side * side * 3, dtype=np.uint32).astype(np.uint8)
    shades = Image.fromarray(values.reshape(side, side, 3))
    read = b"".join(raw.pieces(shades, "RGB", 5))
    return _same_bits(backend, shades, (2, 2)) and read == shades.tobytes()


def _same_bits(
    backend: ResizeBackend, image: Image.Image, grid: tuple[int, int], stretch: bool = False
) -> bool:
    ours, pillows = (
        patches_of(image, grid, PATCH, one, stretch=stretch).view(torch.int16)
        for one in (backend, PILLOW)
    )
    return torch.equal(ours, pillows)


def _noise(width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(width)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
