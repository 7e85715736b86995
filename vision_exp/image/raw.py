"""A decoded image's bytes as Pillow's ``raw`` encoder gives them, without further copies.

`Image.tobytes` makes pieces of 64 KiB and joins them, which takes longer than what is done with
the bytes here. Its encoder is not public: whoever uses this compares first (see backend.py).
https://github.com/python-pillow/Pillow/blob/11.3.0/src/PIL/Image.py (tobytes)
"""

from __future__ import annotations

from collections.abc import Iterator

from PIL import Image


def rows_in(size: int, length: int, unit: int = 1) -> int:
    """How many rows of ``length`` bytes ``size`` bytes hold, in whole units, at least one unit."""
    return max(size // length // unit, 1) * unit


def pieces(image: Image.Image, mode: str, rows: int) -> Iterator[bytes]:
    """The rows of a loaded image from the top, ``rows`` at a time, the last piece maybe fewer.

    ``mode`` is one of Pillow's raw modes, a byte a channel. Raises RuntimeError if Pillow fails.
    """
    encoder = Image._getencoder(image.mode, "raw", mode)
    try:
        encoder.setimage(image.im, (0, 0, *image.size))
        ended = 0
        while not ended:
            _, ended, piece = encoder.encode(rows * image.width * len(mode))
            yield piece
        if ended < 0:
            raise RuntimeError(f"Pillow's encoder ends with {ended}")
    finally:
        encoder.cleanup()
