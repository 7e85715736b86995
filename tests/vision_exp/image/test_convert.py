"""Large images are converted and transposed in strips: the same pixels, no size too large."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from sample_images import noise

from vision_exp.image import convert
from vision_exp.image.convert import to_rgb

MODES = ("RGB", "RGBA", "LA", "PA", "P", "L", "CMYK", "YCbCr", "HSV", "LAB", "RGBa", "I;16")


def sample(mode: str, orientation: int) -> Image.Image:
    if mode == "I;16":
        shades = np.random.default_rng(0).integers(0, 65536, (23, 31), np.uint16)
        image = Image.frombytes(mode, (31, 23), shades.tobytes())
    else:
        image = noise(31, 23, mode)
    if mode in ("L", "P", "I;16"):
        image.info["transparency"] = 7
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.info["exif"] = exif.tobytes()
    return image


@pytest.mark.parametrize("mode", MODES)
def test_strips_give_what_one_piece_gives(mode, monkeypatch) -> None:
    for orientation in range(1, 9):
        whole = to_rgb(sample(mode, orientation))
        assert whole.mode == "RGB" and to_rgb(whole) is whole  # not transposed again
        for rows in (7, 22):
            monkeypatch.setattr(convert, "STRIP", rows * 31 * 4)
            image = sample(mode, orientation)
            stripes = to_rgb(image)
            assert stripes.size == whole.size == ((31, 23) if orientation < 5 else (23, 31))
            assert stripes.tobytes() == whole.tobytes()
            assert to_rgb(stripes) is stripes
            monkeypatch.undo()


def test_the_range_is_that_of_the_whole_image(monkeypatch) -> None:
    """A dark strip of a 16-bit image is scaled as the bright one is."""
    shades = np.array([[200] * 9, [60000] * 9], np.uint16)
    monkeypatch.setattr(convert, "STRIP", 4)
    rgb = to_rgb(Image.frombytes("I;16", (9, 2), shades.tobytes()))
    assert [rgb.getpixel((4, y))[0] for y in (0, 1)] == [0, 234]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [(8400, 8100), (2 * 9459, 9459), (178_956_970, 1)])
def test_every_size_that_pillow_opens_is_converted(mode, size) -> None:
    image = Image.Image()
    image._mode, image._size = mode, size  # no pixels: none of this is decoded
    assert image.width * image.height <= 2 * Image.MAX_IMAGE_PIXELS
    convert._check_size(image, True)


def test_another_background() -> None:
    clear = Image.new("RGBA", (3, 2), (0, 0, 0, 0))
    assert to_rgb(clear, (1, 2, 3)).getpixel((0, 0)) == (1, 2, 3)


def test_values_served_before_are_the_same() -> None:
    """16-bit and float images that lost nothing when Pillow cut them to bytes."""
    grey = np.arange(256, dtype=np.uint16).reshape(8, 32)
    for image in (
        Image.frombytes("I;16", (32, 8), grey.tobytes()),
        Image.fromarray(grey.astype(np.int32)),
        Image.fromarray(grey.astype(np.float32) * 0.99),
    ):
        assert to_rgb(image).tobytes() == image.convert("RGB").tobytes()
