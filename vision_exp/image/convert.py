"""Upright RGB of any PIL image, as a person sees it; docs/images.md has a row for each mode.

Three things are done as vLLM's own loader does them
(https://github.com/vllm-project/vllm/blob/v0.29.0/vllm/multimodal/image.py), so that an image gives
the same patches as a data URL, a file or a PIL object; a second time they change nothing:

- EXIF orientation (tags 2 to 8) is applied before the size is looked at. A tag that cannot be read
  leaves the image as stored.
- Transparency (RGBA, LA, PA, or a transparent colour of any other mode but RGB) is composited on
  a background, white unless another is asked for.
- Every other mode goes through Pillow's ``convert("RGB")``. Of an animation, the current frame
  (the first, unless the caller moved it) is taken. Colour profiles are ignored.

It is left where it would lose the image: values beyond a byte are scaled, not clipped (values.py);
premultiplied modes keep their alpha; an alpha channel of BMP and TGA that is zero everywhere was
never meant.

An image of more than a few megabytes is converted and transposed in strips: beside it there
is only the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from PIL import ExifTags, Image

from vision_exp.image.pixels import pillow_errors
from vision_exp.image.values import to_bytes

Colour = tuple[int, int, int]
Conversion = Callable[[Image.Image], Image.Image]

_WHITE = (255, 255, 255)

#: Bytes of the decoded image and its RGB version together, at most: those of the largest size that
#: Pillow opens (2 * 89,478,485 pixels, 4 bytes each) pass.
MAX_WORKING_BYTES = 1366 << 20

#: Bytes of a strip, about.
STRIP = 32 << 20

#: What EXIF orientation asks for (https://exiftool.org/TagNames/EXIF.html, tag 0x0112).
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)
_FROM_THE_END = (3, 4, 6, 7)  # the first row becomes the last row or column

#: The TIFF tag PhotometricInterpretation: 0 says that 0 is white, which Pillow heeds up to 8 bit.
_PHOTOMETRIC = 262


def to_rgb(image: Image.Image, background: Colour = _WHITE) -> Image.Image:
    """Upright RGB version of an image (itself if it is one). Raises ValueError with the reason."""
    if not isinstance(image, Image.Image):
        raise ValueError(f"expected a PIL image, got {type(image).__name__}")
    if not image.width or not image.height:
        raise ValueError(f"the image is empty ({image.width}x{image.height})")
    with pillow_errors("decoded"):
        _check_size(image, image.mode != "RGB")
        # Before its orientation is looked for: that decodes a PNG as well, and of a damaged one a
        # second decoding gives the part before the damage without a word.
        image.load()
        orientation = _orientation(image)
        if image.mode == "RGB" and orientation == 1:
            return image
        _check_size(image, True)
        rgb = _in_strips(image, _conversion(image, background), orientation)
        rgb.info = {}  # or an orientation in it would count again
        return rgb


def _orientation(image: Image.Image) -> int:
    """EXIF's, 1 (upright) to 8; 1 where it cannot be read, which vLLM's loader does not mind."""
    try:
        found = image.getexif().get(ExifTags.Base.Orientation)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  whatever is wrong with the orientation: as stored
        return 1
    return found if found in _TURNS else 1


def _in_strips(image: Image.Image, convert: Conversion, orientation: int) -> Image.Image:
    rows = _strip_rows(image)
    if rows >= image.height:
        return _turned(convert(image), orientation)
    sideways = orientation in _SIDEWAYS
    result = Image.new("RGB", image.size[::-1] if sideways else image.size)
    for top, strip in _strips(image, rows):
        at = image.height - top - strip.height if orientation in _FROM_THE_END else top
        result.paste(_turned(convert(strip), orientation), (at, 0) if sideways else (0, at))
    return result


def _turned(image: Image.Image, orientation: int) -> Image.Image:
    return image.transpose(_TURNS[orientation]) if orientation in _TURNS else image


def _strip_rows(image: Image.Image) -> int:
    return max(STRIP // (4 * image.width), 1)


def _strips(image: Image.Image, rows: int) -> Iterator[tuple[int, Image.Image]]:
    """(first row, an image of the ``rows`` from there on), from the top."""
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


def _conversion(image: Image.Image, background: Colour) -> Conversion:
    """What turns strips of a loaded image into RGB."""
    if image.mode == "RGB":
        return lambda strip: strip
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _wide(image, background)
    if image.mode in ("RGBa", "La"):
        return lambda strip: _flat(strip.convert(image.mode[:-1] + "A"), background)
    # Decoding may have found the transparent colour only now.
    marked = "transparency" in image.info
    if (marked or image.mode in ("RGBA", "LA", "PA")) and not _alpha_is_unused(image):
        return lambda strip: _flat(strip, background)
    return lambda strip: strip.convert("RGB")


def _flat(strip: Image.Image, background: Colour) -> Image.Image:
    layer = strip if strip.mode == "RGBA" else strip.convert("RGBA")
    ground = Image.new("RGB", layer.size, background)
    ground.paste(layer, mask=layer.getchannel("A"))
    return ground


def _alpha_is_unused(image: Image.Image) -> bool:
    """Whether a BMP or TGA is transparent everywhere: programs that write no alpha leave zeros."""
    if image.format not in ("BMP", "DIB", "TGA") or image.mode != "RGBA":
        return False
    return image.getchannel("A").getextrema() == (0, 0)


def _wide(image: Image.Image, background: Colour) -> Conversion:
    """Grey of more than 8 bit. Raises ValueError where its values have no known range."""
    inverted = image.mode.startswith("I;16") and _zero_is_white(image)
    clear = image.info.get("transparency")

    def values(strip: Image.Image) -> np.ndarray:
        found = np.asarray(strip)
        return 65535 - found if inverted else found

    parts = (values(strip) for _, strip in _strips(image, _strip_rows(image)))
    ends = [(part.min(), part.max()) for part in parts]
    least, most = np.min(ends), np.max(ends)
    limit = 255 if image.mode == "F" else 65535

    def convert(strip: Image.Image) -> Image.Image:
        rgb = Image.fromarray(to_bytes(values(strip), least, most, limit)).convert("RGB")
        if isinstance(clear, int):
            rgb.paste(background, mask=Image.fromarray(np.asarray(strip) == clear))
        return rgb

    return convert


def _zero_is_white(image: Image.Image) -> bool:
    return bool(getattr(image, "tag_v2", {}).get(_PHOTOMETRIC) == 0)


def _check_size(image: Image.Image, converted: bool) -> None:
    """Refuse an image that would take too many bytes, its RGB version included."""
    stored = 1 if image.mode in ("1", "L", "P") else 2 if image.mode.startswith("I;16") else 4
    need = image.width * image.height * (stored + 4 * converted)
    if need > MAX_WORKING_BYTES:
        raise ValueError(
            f"a {image.width}x{image.height} image of mode {image.mode} takes {need >> 20} MiB "
            f"to convert, more than {MAX_WORKING_BYTES >> 20}: make it smaller"
        )
