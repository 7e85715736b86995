from __future__ import annotations

import hashlib
import importlib.util
import json
from io import BytesIO
from pathlib import Path

import native_image
import numpy as np
import PIL
import pytest
import tiny_config
import torch
import vllm_rig
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from vision_exp.config import VisionConfig
from vision_exp.image import pixels
from vision_exp.image.transform import (
    image_to_patches,
    images_to_patches,
    llm_grid_of,
    to_rgb,
    vit_grid_for,
)
from vision_exp.layout import core_length

GOLDEN_FILE = Path(__file__).parents[2] / "goldens" / "image_layout.json"
GOLDENS = json.loads(GOLDEN_FILE.read_text(encoding="utf-8"))["images"]
#: The goldens hold for the resampling of this Pillow on; before, the native code is the reference.
GOLDEN_PILLOW = 13


class HfConfig:
    def __init__(self, **overrides):
        self.__dict__.update(tiny_config.vision_config(**overrides))


CONFIG = VisionConfig.from_hf_config(HfConfig())


@pytest.fixture(params=["plain", "fast"])
def way(request, monkeypatch):
    """The two ways of pixels.py, one after the other."""
    found = pixels.PLAIN if request.param == "plain" else pixels.warm()
    assert (request.param == "fast") == found.resamples
    monkeypatch.setattr(pixels, "_way", found)
    return found


@pytest.fixture(scope="module")
def native():
    return native_image.functions()


@pytest.fixture(scope="module", params=vllm_rig.RELEASES)
def vllm_image(request):
    """A release's own image module; it needs only PIL, so it is loaded as a file."""
    path = vllm_rig.tree(request.param) / "vllm/multimodal/image.py"
    spec = importlib.util.spec_from_file_location("released_vllm_image", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def picture(width: int, height: int) -> Image.Image:
    """The goldens' picture: see `meta.image` in the file."""
    x = np.arange(width, dtype=np.int32)[None, :]
    y = np.arange(height, dtype=np.int32)[:, None]
    base = 7 * x + 13 * y + 5 * (x * y % 17)
    return Image.fromarray(np.stack([(base + 29 * c).astype(np.uint8) for c in range(3)], -1))


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    bands = len(Image.new(mode, (1, 1)).getbands())
    data = np.random.default_rng(width * height).integers(0, 256, (height, width, bands), np.uint8)
    return Image.frombytes(mode, (width, height), data.tobytes())


def same(ours, theirs) -> bool:
    patches, vit_h, vit_w, llm_h, llm_w = theirs
    return (
        ours.patches.dtype == torch.bfloat16
        and ours.patches.is_contiguous()
        and torch.equal(ours.patches.view(torch.int16), patches.contiguous().view(torch.int16))
        and ours.vit_grid == (vit_h, vit_w)
        and ours.llm_grid == (llm_h, llm_w)
    )


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda g: f"{g['width']}x{g['height']}")
def test_goldens(golden, native, way):
    image = picture(golden["width"], golden["height"])
    if int(PIL.__version__.split(".")[0]) < GOLDEN_PILLOW:
        try:
            theirs = native.load_image(image, **native_image.PARAMETERS)
        except ValueError:
            with pytest.raises(ValueError, match="the picture cannot be resized|height and width"):
                image_to_patches(image, CONFIG)
            return
        assert same(image_to_patches(image, CONFIG), theirs)
        return
    ours = image_to_patches(image, CONFIG)
    words = ours.patches.view(torch.int16).numpy().astype("<i2").tobytes()
    assert hashlib.sha256(words).hexdigest() == golden["patches_sha256"]
    assert list(ours.vit_grid) == golden["vit_grid"]
    assert list(ours.llm_grid) == golden["llm_grid"]


@pytest.mark.parametrize("size", [(37, 53), (640, 481), (900, 110), (97, 1500), (3, 2), (1, 3000)])
def test_equals_native(size, native, way):
    image = noise(*size)
    assert same(
        image_to_patches(image, CONFIG), native.load_image(image, **native_image.PARAMETERS)
    )


@pytest.mark.parametrize("patch", [4, 14])
def test_every_byte_value_and_every_place(patch, way):
    """All 256 values in each channel, and a different value at each place of a patch."""
    values = torch.arange(256, dtype=torch.float32)
    expected = ((values / 255 - 0.5) / 0.5).to(torch.bfloat16)
    side = 4 * patch
    ramp = np.arange(side * side).reshape(side, side).astype(np.uint8)
    pixels_in = np.stack([ramp, ramp[::-1], ramp.T], axis=-1)
    assert all(len(np.unique(pixels_in[..., channel])) == 256 for channel in range(3))
    got = pixels.patches_of(Image.fromarray(pixels_in), (4, 4), patch)
    want = expected[torch.from_numpy(pixels_in.astype(np.int64))]
    for row in range(4):
        for column in range(4):
            rows, columns = (slice(patch * at, patch * (at + 1)) for at in (row, column))
            assert torch.equal(got[4 * row + column], want[rows, columns].permute(2, 0, 1))


@settings(max_examples=300)
@given(width=st.integers(1, 1 << 28), height=st.integers(1, 1 << 28))
def test_any_size_fits_and_equals_native(width, height):
    check_grid(width, height, native_image.functions())


def test_grids_of_many_sizes_equal_native(native):
    """Sizes of every ratio, and both sides of the places where the budget binds."""
    rng = np.random.default_rng(0)
    sizes = [(int(w), int(h)) for w, h in np.exp(rng.uniform(0, 9, (3000, 2)))]
    sizes += [(size, 750 + size % 11) for size in range(700, 800)]
    sizes += [(8 * h + d, h) for h in range(1, 300, 7) for d in (-1, 0, 1)]
    most = max(check_grid(width, height, native) for width, height in sizes)
    assert most <= 3312  # 24 x 138, the grid with the most patches


def check_grid(width: int, height: int, native) -> int:
    """Compare with the steps of the native load_image before it touches pixels."""
    wide, high = min(width, height * 8), height
    if wide * high < 147456:
        scale = (147456 / (wide * high)) ** 0.5
        wide, high = int(wide * scale), int(high * scale)
    round_up = [-(-side // 14) * 14 for side in (high, wide)]
    llm_h, llm_w, best_h, best_w = native.safe_resize(high, wide, *round_up, 14, 3, 384)
    grid = vit_grid_for(width, height, CONFIG)
    assert grid == (best_h // 14, best_w // 14)
    assert llm_grid_of(grid, CONFIG) == (llm_h, llm_w)
    assert min(grid) >= 1
    assert core_length((llm_h, llm_w)) + 3 <= 384
    return grid[0] * grid[1]


@settings(max_examples=500)
@given(
    width=st.integers(1, 1 << 20),
    height=st.integers(1, 1 << 20),
    budget=st.integers(48, 500),
    patch=st.integers(1, 32),
    cell=st.integers(2, 4),  # of 1, a float just below 1 may round away
    ratio=st.floats(1, 50),
)
def test_some_grid_fits_under_every_config(width, height, budget, patch, cell, ratio):
    config = VisionConfig.from_hf_config(
        HfConfig(
            vision_max_n_token=budget,
            vision_patch_size=patch,
            vision_downsample_ratio=cell,
            vision_max_wh_ratio=ratio,
        )
    )
    grid = vit_grid_for(width, height, config)
    assert min(grid) >= 1
    assert core_length(llm_grid_of(grid, config)) + 3 <= budget


def test_a_budget_too_small_is_refused():
    config = VisionConfig.from_hf_config(
        HfConfig(vision_max_n_token=10, vision_patch_size=1, vision_downsample_ratio=1)
    )
    with pytest.raises(ValueError, match="no grid for 3x6 pixels fits vision_max_n_token 10"):
        vit_grid_for(3, 6, config)


@pytest.mark.parametrize("tag", range(1, 9))
def test_exif_orientation(tag):
    """A file, and the same picture turned by hand, give equal patches; the grid follows."""
    exif = Image.Exif()
    exif[0x0112] = tag
    buffer = BytesIO()
    noise(240, 160).save(buffer, "PNG", exif=exif)
    stored = Image.open(buffer)
    ours = image_to_patches(stored, CONFIG)
    turned = ImageOps.exif_transpose(Image.open(buffer))
    assert turned.size == ((240, 160) if tag < 5 else (160, 240))
    assert ours.vit_grid == vit_grid_for(*turned.size, CONFIG)
    plain = Image.frombytes("RGB", turned.size, turned.tobytes())
    assert torch.equal(ours.patches, image_to_patches(plain, CONFIG).patches)
    assert torch.equal(ours.patches, image_to_patches(turned, CONFIG).patches)  # turned once


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_unreadable_exif_leaves_the_picture_as_stored():
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
    with pytest.raises(ValueError, match="the picture cannot be decoded: .*truncated"):
        image_to_patches(Image.open(BytesIO(buffer.getvalue()[:-128])), CONFIG)


def test_damaged_png_is_a_value_error():
    """Pillow decodes a PNG when asked for its orientation, and then never complains again."""
    buffer = BytesIO()
    noise(300, 200).save(buffer, "PNG")
    data = bytearray(buffer.getvalue())
    data[len(data) // 2] ^= 0x40
    with pytest.raises(ValueError, match="the picture cannot be decoded: .*broken"):
        image_to_patches(Image.open(BytesIO(bytes(data))), CONFIG)


def test_conversion_that_would_take_too_much_is_refused_before_it_starts(monkeypatch):
    monkeypatch.setattr("vision_exp.image.transform.MAX_WORKING_BYTES", 4 * 100 * 100)
    image_to_patches(noise(100, 100), CONFIG)  # RGB needs no second copy
    with pytest.raises(ValueError, match="100x100 picture of mode RGBA takes"):
        image_to_patches(noise(100, 100, "RGBA"), CONFIG)


def test_several_at_once_equal_one_by_one(way):
    images = [noise(200 + 40 * index, 300 - 20 * index) for index in range(12)]
    together = images_to_patches(images, CONFIG, threads=4)
    for image, ours in zip(images, together, strict=True):
        alone = image_to_patches(image, CONFIG)
        assert torch.equal(ours.patches, alone.patches)
        assert (ours.vit_grid, ours.llm_grid) == (alone.vit_grid, alone.llm_grid)
    assert images_to_patches([], CONFIG) == []


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_one_undecoded_picture_several_times(kind):
    """Pillow cannot decode a file on two threads: it then calls it truncated, or mixes it up."""
    buffer = BytesIO()
    noise(900, 700).save(buffer, kind)
    expected = image_to_patches(Image.open(BytesIO(buffer.getvalue())), CONFIG).patches
    for _ in range(5):
        other, again = noise(30, 40), Image.open(BytesIO(buffer.getvalue()))
        done = images_to_patches([again, other, again, again], CONFIG, threads=4)
        assert [torch.equal(one.patches, expected) for one in done] == [True, False, True, True]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_bad_one_of_several_is_named(threads):
    images = [noise(20, 20), Image.new("RGB", (0, 3)), noise(20, 20)]
    with pytest.raises(ValueError, match="^image 1: the picture is empty"):
        images_to_patches(images, CONFIG, threads=threads)
