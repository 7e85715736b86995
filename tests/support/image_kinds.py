"""Images of every kind that reaches the model, from real files where a file can hold it.

`row` says what one becomes: the page docs/images.md holds these rows.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageCms

from vision_exp.image.convert import to_rgb
from vision_exp.image.files import mended
from vision_exp.image.values import image_of

GREY = np.array([[0, 64, 128, 255]], np.uint8)
WIDE = GREY.astype(np.uint16) * 257
COLOURS = np.array([[[255, 0, 0], [0, 128, 0], [0, 0, 255], [255, 255, 255]]], np.uint8)
CLEAR = np.dstack([COLOURS, np.array([[255, 255, 128, 0]], np.uint8)])  # half, then nothing


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, depth: int, colour: int, row: bytes, *extra: bytes) -> bytes:
    """A PNG of one row, which Pillow would not write."""
    header = struct.pack(">IIBBBBB", width, 1, depth, colour, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(b"\0" + row))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (chunk(b"IHDR", header), *extra, pixels, chunk(b"IEND", b""))
    )


def interlaced(row: bytes) -> bytes:
    """An Adam7 PNG of four grey pixels in one row: passes of pixel 0, of 2, and of 1 and 3."""
    passes = (row[0:1], row[2:3], row[1:2] + row[3:4])
    header = struct.pack(">IIBBBBB", 4, 1, 8, 0, 0, 0, 1)
    pixels = zlib.compress(b"".join(b"\0" + part for part in passes))
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", pixels), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def plain(mode: str, colour: Any) -> Image.Image:
    """Large enough that JPEG keeps its colour."""
    return Image.new(mode, (16, 16), colour)


def frames(kind: str, **options: Any) -> bytes:
    first, second = (plain("RGB", colour) for colour in ("red", "blue"))
    return saved(first, kind, save_all=True, append_images=[second], **options)


def profile() -> bytes:
    """One that would change every colour."""
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()


def without_adobe(data: bytes) -> bytes:
    """The same JPEG without the marker that says that its CMYK is inverted."""
    at = data.index(b"\xff\xee")
    return data[:at] + data[at + 2 + int.from_bytes(data[at + 2 : at + 4], "big") :]


def oriented(kind: str) -> bytes:
    """White beside black, stored on its side, black above: upright, its first row has both."""
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = Image.new("L", (16, 32), "black")
    stored.paste("white", (0, 16, 16, 32))
    options = {"lossless": True} if kind == "WEBP" else {}
    return saved(stored.convert("RGB"), kind, exif=exif, **options)


def palette(**info: Any) -> bytes:
    image = Image.new("P", (4, 1))
    image.putpalette(COLOURS.tobytes())
    image.putdata([0, 1, 2, 3])
    return saved(image, "PNG", **info)


def bmp(alpha: bytes) -> bytes:
    """32 bit with masks: blue, green, red, alpha."""
    pixels = b"".join(
        bytes([*colour[::-1], one]) for colour, one in zip(COLOURS[0].tolist(), alpha, strict=True)
    )
    masks = struct.pack("<IIII", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    header = struct.pack("<IiiHHIIiiII", 108, 4, 1, 1, 32, 3, 16, 0, 0, 0, 0) + masks
    header += b"BGRs" + bytes(48)
    return b"BM" + struct.pack("<IHHI", 14 + 108 + 16, 0, 0, 14 + 108) + header + pixels


def tiff(image: Image.Image, **tags: int) -> bytes:
    return saved(image, "TIFF", tiffinfo={int(key[1:]): value for key, value in tags.items()})


def made(mode: str, values: np.ndarray) -> Image.Image:
    return Image.frombytes(mode, (values.shape[1], values.shape[0]), values.tobytes())


def grey_with_alpha(mode: str) -> Image.Image:
    return made(mode, np.dstack([GREY, np.array([[255, 255, 128, 0]], np.uint8)]))


FLOATS = np.array([[0, 0.25, 0.5, 1]], np.float32)

#: What is given -> the file's bytes, a PIL image, or an array.
KINDS: dict[str, Callable[[], Any]] = {
    "PNG, 8-bit RGB": lambda: saved(made("RGB", COLOURS), "PNG"),
    "PNG, 16-bit RGB": lambda: png(
        4, 16, 2, (COLOURS.astype(np.uint16) * 257).astype(">u2").tobytes()
    ),
    "PNG, RGBA": lambda: saved(made("RGBA", CLEAR), "PNG"),
    "PNG, 16-bit RGBA": lambda: png(
        4, 16, 6, (CLEAR.astype(np.uint16) * 257).astype(">u2").tobytes()
    ),
    "PNG, RGB with a transparent colour (blue)": lambda: saved(
        made("RGB", COLOURS), "PNG", transparency=(0, 0, 255)
    ),
    "PNG, 8-bit grey": lambda: saved(made("L", GREY), "PNG"),
    "PNG, 8-bit grey, interlaced": lambda: interlaced(GREY.tobytes()),
    "PNG, 16-bit grey": lambda: png(4, 16, 0, WIDE.astype(">u2").tobytes()),
    "PNG, 16-bit grey of no value above 255": lambda: png(4, 16, 0, GREY.astype(">u2").tobytes()),
    "PNG, 16-bit grey with a transparent shade (0)": lambda: png(
        4, 16, 0, WIDE.astype(">u2").tobytes(), chunk(b"tRNS", b"\0\0")
    ),
    "PNG, 4-bit grey": lambda: png(4, 4, 0, bytes([0x05, 0xAF])),
    "PNG, 2-bit grey": lambda: png(4, 2, 0, bytes([0b00011011])),
    "PNG, 1-bit": lambda: png(4, 1, 0, bytes([0b01010000])),
    "PNG, grey with alpha": lambda: saved(grey_with_alpha("LA"), "PNG"),
    "PNG, palette": palette,
    "PNG, palette with transparency": lambda: palette(transparency=b"\xff\xff\x80\x00"),
    "PNG with EXIF orientation": lambda: oriented("PNG"),
    "PNG with a colour profile": lambda: saved(made("RGB", COLOURS), "PNG", icc_profile=profile()),
    "PNG without its end (IEND)": lambda: saved(made("RGB", COLOURS), "PNG")[:-12],
    "PNG, damaged pixels": lambda: broken(saved(made("RGB", COLOURS), "PNG")),
    "APNG": lambda: frames("PNG"),
    "JPEG, grey": lambda: saved(plain("L", 128), "JPEG"),
    "JPEG, RGB as YCbCr": lambda: saved(plain("RGB", "red"), "JPEG"),
    "JPEG, CMYK with Adobe's marker": lambda: saved(plain("CMYK", (0, 255, 255, 0)), "JPEG"),
    "JPEG, CMYK without it": lambda: without_adobe(saved(plain("CMYK", (0, 255, 255, 0)), "JPEG")),
    "JPEG with EXIF orientation": lambda: oriented("JPEG"),
    "JPEG, progressive, cut off": lambda: saved(plain("RGB", "red"), "JPEG", progressive=True)[
        :-20
    ],
    "JPEG without its end": lambda: saved(plain("RGB", "red"), "JPEG")[:-2],
    "JPEG 2000, 16-bit grey": lambda: saved(Image.new("I;16", (64, 64), 128 * 257), "JPEG2000"),
    "GIF, animated": lambda: frames("GIF"),
    "WebP, animated": lambda: frames("WEBP", lossless=True),
    "WebP, cut off": lambda: saved(plain("RGB", "red"), "WEBP", lossless=True)[:-2],
    "WebP, RGBA": lambda: saved(made("RGBA", CLEAR), "WEBP", lossless=True),
    "WebP with EXIF orientation": lambda: oriented("WEBP"),
    "AVIF": lambda: saved(plain("RGB", "white"), "AVIF"),
    "BMP with alpha": lambda: bmp(CLEAR[0, :, 3].tobytes()),
    "BMP with an alpha that is 0 everywhere": lambda: bmp(bytes(4)),
    "TGA with alpha": lambda: saved(made("RGBA", CLEAR), "TGA"),
    "TIFF, 16-bit grey": lambda: tiff(made("I;16", WIDE)),
    "TIFF, 16-bit grey, 0 is white": lambda: tiff(made("I;16", WIDE), t262=0),
    "TIFF, 16-bit grey, big-endian": lambda: tiff(made("I;16B", WIDE.astype(">u2"))),
    "TIFF, 32-bit integers up to 65535": lambda: tiff(Image.fromarray(WIDE.astype(np.int32))),
    "TIFF, 32-bit integers beyond": lambda: tiff(Image.fromarray(WIDE.astype(np.int32) * 9)),
    "TIFF, float, 0 to 1": lambda: tiff(Image.fromarray(FLOATS)),
    "TIFF, several pages": lambda: frames("TIFF"),
    "TIFF, CMYK": lambda: tiff(plain("CMYK", (0, 255, 255, 0))),
    "TIFF, LAB": lambda: tiff(plain("LAB", (0, 128, 128))),
    "PPM, 16-bit grey": lambda: b"P5 4 1 65535\n" + WIDE.astype(">u2").tobytes(),
    "PFM, 0 to 1": lambda: b"Pf\n4 1\n-1.0\n" + FLOATS.astype("<f4").tobytes(),
    "PIL image, LA": lambda: grey_with_alpha("LA"),
    "PIL image, PA": lambda: with_palette(grey_with_alpha("PA")),
    "PIL image, RGBa (premultiplied)": lambda: made("RGBA", CLEAR).convert("RGBa"),
    "PIL image, La (premultiplied)": lambda: grey_with_alpha("LA").convert("La"),
    "PIL image, YCbCr": lambda: plain("YCbCr", (128, 128, 128)),
    "PIL image, HSV": lambda: plain("HSV", (0, 255, 255)),
    "PIL image, I, below 0": lambda: Image.fromarray(np.array([[-1, 255]], np.int32)),
    "PIL image, F, 0 to 255": lambda: Image.fromarray(GREY.astype(np.float32)),
    "PIL image, F, NaN in it": lambda: Image.fromarray(np.array([[np.nan, 1]], np.float32)),
    "array, uint8, (height, width, 3)": lambda: np.tile(COLOURS, (2, 1, 1)),
    "array, uint8, (3, height, width)": lambda: np.moveaxis(np.tile(COLOURS, (2, 1, 1)), 2, 0),
    "array, uint8, (1, height, width)": lambda: np.tile(GREY, (1, 2, 1)),
    "array, uint8, (3, 6, 4)": lambda: np.broadcast_to(
        np.array([255, 0, 0], np.uint8)[:, None, None], (3, 6, 4)
    ),
    "array, uint8, (5, width, 4)": lambda: np.tile(CLEAR, (5, 1, 1)),
    "array, uint8, (3, width, 3)": lambda: np.tile(COLOURS, (3, 1, 1)),
    "array, uint8, (height, width)": lambda: GREY,
    "array, bool": lambda: GREY > 100,
    "array, uint16": lambda: WIDE,
    "array, int64, 0 to 255": lambda: GREY.astype(np.int64),
    "array, int64, beyond": lambda: WIDE.astype(np.int64),
    "array, float, 0 to 1": lambda: FLOATS,
    "array, float, 0 to 255": lambda: GREY.astype(np.float64),
    "array, float, -1 to 1": lambda: FLOATS * 2 - 1,
    "tensor, bfloat16, 0 to 1": lambda: torch.from_numpy(FLOATS).bfloat16(),
}


def with_palette(image: Image.Image) -> Image.Image:
    image.putpalette(np.repeat(np.arange(256, dtype=np.uint8), 3).tobytes())
    return image


def broken(data: bytes) -> bytes:
    at = data.index(b"IDAT") + 8
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def row(name: str) -> str:
    """The table's row of a kind: its Pillow mode, and the first row of what the model sees.

    A shade of grey is one number; equal neighbours are said once.
    """
    mode = ""
    try:
        given = KINDS[name]()
        if isinstance(given, bytes):
            given = Image.open(BytesIO(mended(given)))
        mode = given.mode if isinstance(given, Image.Image) else ""
        rgb = to_rgb(given if isinstance(given, Image.Image) else image_of(given))
    except (ValueError, OSError) as error:
        return f"| {name} | {mode} | refused: {str(error).split(':')[0]} |"
    pixels = [rgb.getpixel((x, 0)) for x in range(rgb.width)]
    shown = [str(one[0]) if len(set(one)) == 1 else str(one) for one in pixels]
    distinct = [one for at, one in enumerate(shown) if not at or one != shown[at - 1]]
    return f"| {name} | {mode} | {', '.join(distinct)} |"
