"""Images for the validator: made here, so that what they show is known."""

from __future__ import annotations

import base64
import io
import random
import re
from typing import Any

from PIL import Image, ImageDraw

Part = dict[str, Any]
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


def disc(colour: str, seed: int) -> Part:
    """A large disc of one colour."""
    return part(_disc(colour, seed, 448, (0.5, 0.5), 0.3))


def marker(x: float, y: float) -> Part:
    """A small red disc with its centre at (x, y), in parts of the side."""
    return part(_disc("red", 7, 896, (x, y), 0.03))


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """Soft grey noise: flat images make poor probes."""
    cells = (max(width // 16, 1), max(height // 16, 1))
    values = random.Random(seed or width * 31 + height).choices(
        range(150, 200), k=cells[0] * cells[1]
    )
    small = Image.new("L", cells)
    small.putdata(values)
    return small.resize((width, height), Image.Resampling.BILINEAR).convert("RGB")


def formats() -> dict[str, Part]:
    """Modes and formats that clients send."""
    base = _disc("blue", 5, 300, (0.5, 0.5), 0.3)
    transparent = base.convert("RGBA")
    transparent.putalpha(128)
    modes = {
        "grey PNG": base.convert("L"),
        "palette PNG": base.convert("P"),
        "transparent PNG": transparent,
        "16-bit grey PNG": base.convert("L").convert("I;16"),
        "CMYK JPEG": base.convert("CMYK"),
    }
    modes |= dict.fromkeys(("JPEG", "WEBP", "GIF", "BMP"), base)
    return {name: part(image, name.split()[-1]) for name, image in modes.items()}


def broken() -> dict[str, Part]:
    """What is no image, or not a whole one."""
    whole = _encode(noise(448, 448), "PNG")
    return {
        "no image": _data_url(b"this is no image", "PNG"),
        "cut short": _data_url(whole[: len(whole) // 2], "PNG"),
    }


def part(image: Image.Image, form: str = "PNG") -> Part:
    """An ``image_url`` content part with the image in a data URL."""
    return _data_url(_encode(image, form), form)


def colours_named(text: str) -> list[str]:
    """Each of `COLOURS` that a text has as a whole word, once, in the order of first mention.

    A right answer may say its colour twice, and the ground's: that is grey, none of these.
    """
    found = re.findall(r"[^\W\d_]+", text.lower())
    return list(dict.fromkeys(word for word in found if word in COLOURS))


def _disc(
    colour: str, seed: int, size: int, centre: tuple[float, float], radius: float
) -> Image.Image:
    image = noise(size, size, seed)
    x, y = centre
    box = [(size * (x - radius), size * (y - radius)), (size * (x + radius), size * (y + radius))]
    ImageDraw.Draw(image).ellipse(box, fill=COLOURS[colour])
    return image


def _encode(image: Image.Image, form: str) -> bytes:
    sink = io.BytesIO()
    image.save(sink, format=form)
    return sink.getvalue()


def _data_url(data: bytes, form: str) -> Part:
    url = f"data:image/{form.lower()};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
