"""Checks of the pictures that the processor reads: vLLM's own, without its copies."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
from checks import check, equal
from PIL import ExifTags, Image
from rig_model import Rig, noise


def pictures() -> Iterator[tuple[str, Image.Image]]:
    """Every mode that Pillow converts to RGB, see-through ones, turned ones, and a file."""
    picture = noise(31, 17)
    for mode in ("RGB", "L", "1", "P", "CMYK", "YCbCr", "HSV", "I", "F", "RGBA", "LA"):
        yield mode, picture.convert(mode)
    for mode in ("RGBA", "LA"):
        layer = picture.convert(mode)
        layer.putalpha(noise(31, 17, seed=1).convert("L"))
        yield f"{mode}, see-through", layer
    for mode in ("P", "L", "RGB"):
        clear = picture.convert(mode)
        clear.info["transparency"] = (0, 0, 0) if mode == "RGB" else 7
        yield f"{mode} with a transparent colour", clear
    for orientation in range(1, 10):
        turned = picture.copy()
        turned.getexif()[ExifTags.Base.Orientation] = orientation
        yield f"orientation {orientation}", turned
        file = io.BytesIO()
        picture.save(file, "JPEG", exif=turned.getexif())
        yield f"JPEG, orientation {orientation}", Image.open(file)


@check
def they_are_as_vllms_parser_makes_them(rig: Rig) -> None:
    from vllm.multimodal.parse import MultiModalDataParser

    info = rig.processor().info
    for what, picture in pictures():
        before = picture.tobytes()
        (wanted,) = MultiModalDataParser().parse_mm_data({"image": picture})["image"]
        for form in (picture, [picture], (picture,), [picture, np.asarray(noise(5, 5))]):
            made = plain(info, form)[0]
            equal((made.mode, made.size), (wanted.mode, wanted.size), what)
            equal(made.tobytes() == wanted.tobytes(), True, what)
        equal(picture.tobytes() == before, True, f"{what}: the caller's picture")


@check
def an_upright_rgb_picture_is_not_copied(rig: Rig) -> None:
    info = rig.processor().info
    picture = noise(31, 17)
    for form in (picture, [picture]):
        equal(plain(info, form)[0] is picture, True)


@check
def hashes_cover_every_piece_of_the_pixels(rig: Rig) -> None:
    processor = rig.processor()
    picture = noise(1200, 900)
    equal(rig.hash_of(processor, picture), rig.hash_of(processor, picture.copy()))
    for at in ((0, 0), (600, 450), (1199, 899)):
        other = picture.copy()
        other.putpixel(at, tuple(255 - value for value in picture.getpixel(at)))
        equal(rig.hash_of(processor, picture) == rig.hash_of(processor, other), False, at)


@check
def hashes_are_the_same_without_compiled_loops(rig: Rig) -> None:
    from unittest import mock

    from vision_exp.image.pixels import PILLOW

    processor = rig.processor()
    for picture in (noise(1, 1), noise(41, 37), noise(1200, 900)):
        compiled = rig.hash_of(processor, picture)
        with mock.patch("vision_exp.model.items.warm_up", return_value=PILLOW):
            equal(rig.hash_of(processor, picture), compiled, picture.size)


@check
def exif_that_cannot_be_read_is_no_error(rig: Rig) -> None:
    processor = rig.processor()
    for mode in ("RGB", "L", "CMYK", "1"):
        file = io.BytesIO()
        noise(20, 20).convert(mode).save(file, "JPEG", exif=b"Exif\0\0not a tag")
        without = Image.open(file).convert("RGB")
        without.info.clear()
        equal(rig.hash_of(processor, Image.open(file)), rig.hash_of(processor, without), mode)


def plain(info: Any, images: Any) -> list[Image.Image]:
    """The pictures that hashes and patches are made of."""
    from vision_exp.model.items import plain_pictures

    parsed = info.parse_mm_data({"image": images})["image"]
    return list(plain_pictures(parsed, None, info.vision))
