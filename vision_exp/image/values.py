"""Values that are no bytes, and arrays of any layout, as 8-bit images.

Pillow clips what is above 255, so that most of a 16-bit image is white. What that loses nothing of
is left as it is; the rest is scaled where its range is known, and refused where it is not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image

#: Numbers of channels, the surest first: a 3 at one end of a shape outweighs a 4 at the other.
_CHANNELS = ((1, 3), (4,), (2,))


def to_bytes(values: np.ndarray, least: float, most: float, limit: int) -> np.ndarray:
    """Values of an image (any shape) as uint8 of that shape.

    ``least`` and ``most`` are those of the whole image, of which ``values`` may be a part.
    Floating-point values of at most 1 are multiplied by 255 and rounded. Else values of at most
    255 stay, cut to whole numbers as Pillow cuts them, and greater ones are 16-bit values, of
    which the high byte is taken, as Pillow does it with 16-bit colour. Raises ValueError for
    values below 0 or above ``limit``, and for NaN.
    """
    if not 0 <= least <= most <= limit:
        ranges = "0 to 255, or 0 to 65535 in 16 bit" if limit > 255 else "0 to 1, or 0 to 255"
        raise ValueError(
            f"its values go from {least:g} to {most:g}, and what is white among them is unknown: "
            f"scale them to {ranges}"
        )
    if values.dtype.kind == "f" and most <= 1:
        return np.rint(values.astype(np.float32) * 255).astype(np.uint8)
    return (values >> 8 if most > 255 else values).astype(np.uint8)


def image_of(value: Any) -> Image.Image:
    """A numpy array or torch tensor as a PIL image (L, LA, RGB or RGBA).

    Shapes: (height, width), or with 1 to 4 channels last or first. Types: see `to_bytes`; bool is
    black and white. Raises ValueError for any other value.
    """
    if isinstance(value, torch.Tensor):
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy(force=True)
    if not isinstance(value, np.ndarray):
        raise ValueError(f"expected a URL, a PIL image or an array, got {type(value).__name__}")
    if value.dtype.kind not in "buif":
        raise ValueError(f"an array of {value.dtype} is no image")
    if not value.size:
        raise ValueError(f"the image is empty (an array of shape {value.shape})")
    array = _channels_last(value)
    if array.dtype == np.bool_:
        array = array.astype(np.uint8) * 255
    elif array.dtype != np.uint8:
        limit = 65535 if array.dtype == np.uint16 else 255
        array = to_bytes(array, array.min(), array.max(), limit)
    return Image.fromarray(np.ascontiguousarray(array))


def _channels_last(array: np.ndarray) -> np.ndarray:
    """(height, width), or (height, width, 2 to 4)."""
    if array.ndim == 2:
        return array
    for counts in _CHANNELS if array.ndim == 3 else ():
        first, last = array.shape[0] in counts, array.shape[2] in counts
        if first and last:
            raise ValueError(
                f"an array of shape {array.shape} may have its channels first or last: pass a PIL "
                "image"
            )
        if first or last:
            array = array if last else np.moveaxis(array, 0, 2)
            return array[..., 0] if array.shape[2] == 1 else array
    raise ValueError(
        f"an array of shape {array.shape} is no image: expected (height, width), or 1 to 4 "
        "channels first or last"
    )
