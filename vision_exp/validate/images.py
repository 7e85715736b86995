"""Images for the validator: made here, so that what they show is known."""

import base64
import io
import random
import re
from collections.abc import Iterator
from typing import Any

from PIL import Image, ImageDraw

Part = dict[str, Any]
#: A name, an image, and the format to send it in.
Sample = tuple[str, Image.Image, str]
COLOURS = ("red", "green", "blue", "yellow", "black", "white")
NAME_COLOUR = "What colour is the disc? Answer with one word."
#: (width, height) that a server must take: tiny, huge, far from square, no multiple of anything.
SHAPES = [(1, 1), (14, 14), (640, 480), (333, 777), (1920, 1080), (4000, 3000)]
SHAPES += [(2000, 200), (200, 2000), (3000, 20), (20, 3000), (512, 4096), (1023, 127)]
#: Modes and formats that clients send.
FORMATS = ["RGB JPEG", "RGB WEBP", "RGB GIF", "RGB BMP", "CMYK JPEG"]
FORMATS += ["L PNG", "I;16 PNG", "P PNG", "RGBA PNG"]


def noise(width: int, height: int, seed: int) -> Image.Image:
    """Soft grey noise: flat images make poor probes."""
    small = Image.new("L", (max(width // 16, 1), max(height // 16, 1)))
    small.putdata(random.Random(seed).choices(range(150, 200), k=small.width * small.height))
    return small.resize((width, height), Image.Resampling.BILINEAR).convert("RGB")


def disc(
    colour: str, seed: int, size: int = 448, x: float = 0.5, y: float = 0.5, radius: float = 0.3
) -> Image.Image:
    """A disc of one colour on noise; its centre and radius in parts of the side."""
    image = noise(size, size, seed)
    ImageDraw.Draw(image).circle((size * x, size * y), size * radius, fill=colour)
    return image


def shapes() -> Iterator[Sample]:
    return ((f"{width}x{height}", noise(width, height, width), "PNG") for width, height in SHAPES)


def formats() -> Iterator[Sample]:
    for name in FORMATS:
        mode, form = name.split()
        image = disc("blue", 5, 300)
        image = (image.convert("L") if mode == "I;16" else image).convert(mode)
        if mode == "RGBA":
            image.putalpha(128)
        yield name, image, form


def part(image: Image.Image | bytes, form: str = "PNG") -> Part:
    """An ``image_url`` content part with the image, or what is sent as one, in a data URL."""
    data = image if isinstance(image, bytes) else encode(image, form)
    url = f"data:image/{form.lower()};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def shows(colour: str, seed: int, question: str = NAME_COLOUR) -> list[Any]:
    """An image of one colour's disc, and a question: what a user message is made of."""
    return [part(disc(colour, seed)), question]


def encode(image: Image.Image, form: str = "PNG") -> bytes:
    sink = io.BytesIO()
    image.save(sink, format=form)
    return sink.getvalue()


def colours_named(text: str) -> list[str]:
    """Each of `COLOURS` that a text has as a whole word, once, in the order of first mention.

    A right answer may say its colour twice, and the ground's: that is grey, none of these.
    """
    found = re.findall(r"[^\W\d_]+", text.lower())
    return list(dict.fromkeys(word for word in found if word in COLOURS))
