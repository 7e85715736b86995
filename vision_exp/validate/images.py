"""Pictures for the validator: made here, so that what they show is known."""

from __future__ import annotations

import base64
import io
import random
import re
from typing import Any

from PIL import Image, ImageDraw

COLOURS = {
    "red": (220, 30, 30),
    "green": (20, 150, 40),
    "blue": (30, 60, 220),
    "yellow": (240, 220, 30),
    "black": (10, 10, 10),
    "white": (250, 250, 250),
}
#: (width, height) that a server must take: tiny, huge, far from square, no multiple of anything.
SHAPES = [(1, 1), (14, 14), (640, 480), (333, 777), (1920, 1080), (4000, 3000)]
SHAPES += [(2000, 200), (200, 2000), (3000, 20), (20, 3000), (512, 4096), (1023, 127)]


def disc(colour: str, seed: int, size: int = 448) -> Image.Image:
    """A large disc of one colour on soft grey noise (flat pictures make poor probes)."""
    picture = _noise(size, size, seed)
    draw = ImageDraw.Draw(picture)
    draw.ellipse((size * 0.2, size * 0.2, size * 0.8, size * 0.8), fill=COLOURS[colour])
    return picture


def marker(x: float, y: float, size: int = 896) -> Image.Image:
    """A small red disc with its centre at (x, y), in parts of the side, on soft grey noise."""
    picture = _noise(size, size, 7)
    radius, draw = size * 0.03, ImageDraw.Draw(picture)
    centre = (x * size, y * size)
    box = (centre[0] - radius, centre[1] - radius, centre[0] + radius, centre[1] + radius)
    draw.ellipse(box, fill=COLOURS["red"])
    return picture


def any_shape(width: int, height: int) -> Image.Image:
    return _noise(width, height, width * 31 + height)


def kinds() -> dict[str, tuple[Image.Image, str]]:
    """Modes and formats that clients send: name -> (picture, format)."""
    base = disc("blue", 5, 300)
    see_through = base.convert("RGBA")
    see_through.putalpha(128)
    return {
        "grey PNG": (base.convert("L"), "PNG"),
        "palette PNG": (base.convert("P"), "PNG"),
        "transparent PNG": (see_through, "PNG"),
        "16-bit grey PNG": (base.convert("L").convert("I;16"), "PNG"),
        "JPEG": (base, "JPEG"),
        "CMYK JPEG": (base.convert("CMYK"), "JPEG"),
        "WebP": (base, "WEBP"),
        "GIF": (base, "GIF"),
        "BMP": (base, "BMP"),
    }


def part(picture: Image.Image, form: str = "PNG") -> dict[str, Any]:
    """An ``image_url`` content part with the picture in a data URL."""
    sink = io.BytesIO()
    picture.save(sink, format=form)
    return raw_part(sink.getvalue(), f"image/{form.lower()}")


def raw_part(data: bytes, kind: str) -> dict[str, Any]:
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def colours_named(text: str) -> list[str]:
    """Each of `COLOURS` that a text has as a whole word, once, in the order of first mention.

    A right answer may say its colour twice, and the ground's: that is grey, none of these.
    """
    found = re.findall(r"[^\W\d_]+", text.lower())
    return list(dict.fromkeys(word for word in found if word in COLOURS))


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _noise(width: int, height: int, seed: int) -> Image.Image:
    cells = (max(width // 16, 1), max(height // 16, 1))
    values = random.Random(seed).choices(range(150, 200), k=cells[0] * cells[1])
    small = Image.new("L", cells)
    small.putdata(values)
    return small.resize((width, height), Image.Resampling.BILINEAR).convert("RGB")
