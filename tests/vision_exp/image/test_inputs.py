"""What may go in: orientation, transparency, modes, damaged files; all as vLLM's loader does."""

from __future__ import annotations

import importlib.util
from io import BytesIO

import numpy as np
import pytest
import sample_images
import torch
import vllm_rig
from PIL import Image, ImageOps
from sample_images import noise

from vision_exp.image.transform import image_to_patches, to_rgb, vit_grid_for

CONFIG = sample_images.config()


@pytest.fixture(scope="module", params=vllm_rig.RELEASES)
def vllm_image(request):
    """A release's own image module; it needs only PIL, so it is loaded as a file."""
    path = vllm_rig.tree(request.param) / "vllm/multimodal/image.py"
    spec = importlib.util.spec_from_file_location("released_vllm_image", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("tag", range(1, 9))
def test_exif_orientation(tag):
    """A file, and the same image transposed by hand, give equal patches; the grid follows."""
    exif = Image.Exif()
    exif[0x0112] = tag
    buffer = BytesIO()
    noise(240, 160).save(buffer, "PNG", exif=exif)
    stored = Image.open(buffer)
    ours = image_to_patches(stored, CONFIG)
    upright = ImageOps.exif_transpose(Image.open(buffer))
    assert upright.size == ((240, 160) if tag < 5 else (160, 240))
    assert ours.vit_grid == vit_grid_for(*upright.size, CONFIG)
    plain = Image.frombytes("RGB", upright.size, upright.tobytes())
    assert torch.equal(ours.patches, image_to_patches(plain, CONFIG).patches)
    assert torch.equal(ours.patches, image_to_patches(upright, CONFIG).patches)  # transposed once


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_unreadable_exif_leaves_the_image_as_stored():
    image = noise(30, 20)
    image.info["exif"] = b"Exif\0\0II*\0\xff\xff\xff\xff"
    assert to_rgb(image) is image


def test_white_shows_through():
    rgba = Image.new("RGBA", (32, 32), (200, 0, 0, 0))
    rgba.putpixel((0, 0), (10, 20, 30, 255))
    rgba.putpixel((1, 0), (0, 0, 0, 128))
    rgb = to_rgb(rgba)
    assert [rgb.getpixel((x, 0)) for x in range(3)] == [(10, 20, 30), (127,) * 3, (255,) * 3]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P", "L", "1", "CMYK", "YCbCr", "HSV", "LAB"])
def test_modes_match_the_loader_of_vllm(mode, vllm_image):
    image = noise(40, 30, mode) if mode != "1" else noise(40, 30, "L").convert("1")
    if mode in ("P", "L"):
        image.info["transparency"] = 7
    expected = vllm_image.convert_image_mode(vllm_image.normalize_image(image), "RGB")
    assert to_rgb(image).tobytes() == expected.tobytes()


def test_rgb_with_a_transparent_colour_stays(vllm_image):
    image = noise(40, 30)
    image.info["transparency"] = image.getpixel((0, 0))
    assert to_rgb(image) is image
    assert vllm_image.convert_image_mode(image, "RGB") is image


@pytest.mark.parametrize("mode", ["I", "F", "I;16", "RGBa", "La", "RGBX", "I;16B"])
def test_rare_modes_give_patches_or_a_reason(mode):
    try:
        patches = image_to_patches(Image.new(mode, (50, 40)), CONFIG).patches
    except ValueError as error:
        assert str(error)
    else:
        assert patches.shape[1:] == (3, 14, 14)


def test_animation_gives_its_first_frame():
    buffer = BytesIO()
    frames = [Image.new("RGB", (60, 40), colour) for colour in ("red", "blue")]
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    ours = image_to_patches(Image.open(buffer), CONFIG)
    assert torch.equal(ours.patches, image_to_patches(frames[0], CONFIG).patches)


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (np.zeros((4, 4, 3), np.uint8), "expected a PIL image, got ndarray"),
        (Image.new("RGB", (0, 5)), "empty"),
    ],
)
def test_refusals_say_why(image, reason):
    with pytest.raises(ValueError, match=reason):
        image_to_patches(image, CONFIG)


def test_truncated_file_is_a_value_error():
    buffer = BytesIO()
    noise(300, 200).save(buffer, "JPEG")
    with pytest.raises(ValueError, match="the image cannot be decoded: .*truncated"):
        image_to_patches(Image.open(BytesIO(buffer.getvalue()[:-128])), CONFIG)


def test_damaged_png_is_a_value_error():
    """Pillow decodes a PNG when asked for its orientation, and then never complains again."""
    buffer = BytesIO()
    noise(300, 200).save(buffer, "PNG")
    data = bytearray(buffer.getvalue())
    data[len(data) // 2] ^= 0x40
    with pytest.raises(ValueError, match="the image cannot be decoded: .*broken"):
        image_to_patches(Image.open(BytesIO(bytes(data))), CONFIG)


def test_conversion_that_would_take_too_much_is_refused_before_it_starts(monkeypatch):
    monkeypatch.setattr("vision_exp.image.convert.MAX_WORKING_BYTES", 4 * 100 * 100)
    plain = noise(100, 100)
    plain.info["transparency"] = (1, 2, 3)
    image_to_patches(plain, CONFIG)  # RGB needs no second copy
    with pytest.raises(ValueError, match="100x100 image of mode RGBA takes"):
        image_to_patches(noise(100, 100, "RGBA"), CONFIG)
