"""Checks of the images that the processor reads: vLLM's own, without its copies."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from checks import check, equal
from PIL import ExifTags, Image
from rig_model import Rig, noise


def images() -> Iterator[tuple[str, Image.Image]]:
    """Every mode that Pillow converts to RGB, transparent, with an orientation, and a file."""
    image = noise(31, 17)
    for mode in ("RGB", "L", "1", "P", "CMYK", "YCbCr", "HSV", "I", "F", "RGBA", "LA"):
        yield mode, image.convert(mode)
    for mode in ("RGBA", "LA"):
        layer = image.convert(mode)
        layer.putalpha(noise(31, 17, seed=1).convert("L"))
        yield f"{mode}, transparent", layer
    for mode in ("P", "L", "RGB"):
        clear = image.convert(mode)
        clear.info["transparency"] = (0, 0, 0) if mode == "RGB" else 7
        yield f"{mode} with a transparent colour", clear
    for orientation in range(1, 10):
        oriented = image.copy()
        oriented.getexif()[ExifTags.Base.Orientation] = orientation
        yield f"orientation {orientation}", oriented
        file = io.BytesIO()
        image.save(file, "JPEG", exif=oriented.getexif())
        yield f"JPEG, orientation {orientation}", Image.open(file)


@check
def they_are_as_vllms_parser_makes_them(rig: Rig) -> None:
    from vllm.multimodal.parse import MultiModalDataParser

    info = rig.processor().info
    for what, image in images():
        before = image.tobytes()
        (wanted,) = MultiModalDataParser().parse_mm_data({"image": image})["image"]
        for form in (image, [image], (image,), [image, np.asarray(noise(5, 5))]):
            made = plain(info, form)[0]
            equal((made.mode, made.size), (wanted.mode, wanted.size), what)
            equal(made.tobytes() == wanted.tobytes(), True, what)
        equal(image.tobytes() == before, True, f"{what}: the caller's image")


@check
def arrays_and_wide_images_are_what_they_show(rig: Rig) -> None:
    info = rig.processor().info
    image = noise(31, 17)
    last = np.asarray(image)
    first = torch.from_numpy(last.copy()).permute(2, 0, 1)
    for what, array in {
        "channels last": last,
        "channels first": first.numpy(),
        "a tensor": first,
        "0 to 1": first / 255,
        "bfloat16": first.bfloat16() / 255,
    }.items():
        equal(plain(info, [array])[0].tobytes() == image.tobytes(), True, what)
    grey = image.convert("L")
    shades = np.asarray(grey)
    wide = Image.frombytes("I;16", grey.size, (shades.astype(np.uint16) * 257).tobytes())
    for what, form in {
        "two dimensions": shades,
        "16 bit": wide,
        "16 bit beside another": [wide, last],
        "16 bit beside another, a tuple": (wide, last),
    }.items():
        equal(plain(info, form)[0].tobytes() == grey.convert("RGB").tobytes(), True, what)


@check
def an_upright_rgb_image_is_not_copied(rig: Rig) -> None:
    info = rig.processor().info
    image = noise(31, 17)
    for form in (image, [image]):
        equal(plain(info, form)[0] is image, True)


@check
def hashes_cover_every_piece_of_the_pixels(rig: Rig) -> None:
    processor = rig.processor()
    image = noise(1200, 900)
    equal(rig.hash_of(processor, image), rig.hash_of(processor, image.copy()))
    for at in ((0, 0), (600, 450), (1199, 899)):
        other = image.copy()
        other.putpixel(at, tuple(255 - value for value in image.getpixel(at)))
        equal(rig.hash_of(processor, image) == rig.hash_of(processor, other), False, at)


@check
def hashes_cover_size_mode_and_background(rig: Rig) -> None:
    from vllm.multimodal.media import MediaWithBytes

    processor = rig.processor()

    def key(image: Any) -> str:
        return rig.hash_of(processor, image)

    pixels = random.Random(1).randbytes(3 * 30 * 150)
    wide = Image.frombytes("RGB", (150, 30), pixels)
    high = Image.frombytes("RGB", (30, 150), pixels)
    equal(key(wide) == key(high), False, "equal bytes, other shape")
    one_off = wide.copy()
    one_off.putpixel((0, 0), tuple(255 - value for value in wide.getpixel((0, 0))))
    equal(key(wide) == key(one_off), False, "one pixel")
    equal(key(wide), key(wide.copy()), "the same image")
    grey = wide.convert("L")
    equal(key(grey) == key(wide), False, "mode")

    # One PNG with a transparent part, loaded on two backgrounds: same bytes, other images.
    png = io.BytesIO()
    Image.new("RGBA", (40, 40), (255, 0, 0, 0)).save(png, "PNG")
    white, black = (
        MediaWithBytes(Image.new("RGB", (40, 40), colour), png.getvalue())
        for colour in ("white", "black")
    )
    equal(key(white) == key(black), False, "background")
    equal(key(white), key(Image.new("RGB", (40, 40), "white")), "loaded and given")

    # A palette's transparent colour is in no pixel, but decides what is seen.
    plain, clear = (Image.new("P", (40, 40)) for _ in range(2))
    for one in (plain, clear):
        one.putpalette([200, 0, 0] * 256)
    clear.info["transparency"] = 0
    equal(key(MediaWithBytes(plain, b"")) == key(MediaWithBytes(clear, b"")), False, "palette")


@check
def hashes_cover_the_vision_config(rig: Rig) -> None:
    from vllm.multimodal import MULTIMODAL_REGISTRY

    image = noise(300, 300)
    other = rig.model_config(rig.vision_folder, hf_overrides={"vision_max_n_token": 200})
    keys = {
        rig.hash_of(processor, image)
        for processor in (rig.processor(), MULTIMODAL_REGISTRY.create_processor(other))
    }
    equal(len(keys), 2)


@check
def hashes_are_the_same_without_compiled_loops(rig: Rig) -> None:
    from unittest import mock

    from vision_exp.image.pixels import PILLOW

    processor = rig.processor()
    for image in (noise(1, 1), noise(41, 37), noise(1200, 900)):
        compiled = rig.hash_of(processor, image)
        with mock.patch("vision_exp.model.items.warm_up", return_value=PILLOW):
            equal(rig.hash_of(processor, image), compiled, image.size)


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
    """The images that hashes and patches are made of."""
    from vision_exp.model.items import normalize_images

    parsed = info.parse_mm_data({"image": images})["image"]
    return list(normalize_images(parsed, None, info.vision))
