"""Images to patches and their grids, against the goldens and the native functions."""

from __future__ import annotations

import hashlib
import json
from io import BytesIO
from pathlib import Path

import native_image
import numpy as np
import PIL
import pytest
import sample_images
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sample_images import noise

from vision_exp.image import pixels
from vision_exp.image.transform import (
    image_to_patches,
    images_to_patches,
    llm_grid_of,
    vit_grid_for,
)
from vision_exp.layout import unpadded_length

GOLDEN_FILE = Path(__file__).parents[2] / "goldens" / "image_layout.json"
GOLDENS = json.loads(GOLDEN_FILE.read_text(encoding="utf-8"))["images"]
#: The goldens hold for the resampling of this Pillow on; before, the native code is the reference.
GOLDEN_PILLOW = 13

CONFIG = sample_images.config()


def golden_image(width: int, height: int) -> Image.Image:
    """The goldens' image: see `meta.image` in the file."""
    x = np.arange(width, dtype=np.int32)[None, :]
    y = np.arange(height, dtype=np.int32)[:, None]
    base = 7 * x + 13 * y + 5 * (x * y % 17)
    return Image.fromarray(np.stack([(base + 29 * c).astype(np.uint8) for c in range(3)], -1))


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
def test_goldens(golden, native, each_backend):
    image = golden_image(golden["width"], golden["height"])
    if int(PIL.__version__.split(".")[0]) < GOLDEN_PILLOW:
        try:
            theirs = native.load_image(image, **native_image.PARAMETERS)
        except ValueError:
            with pytest.raises(ValueError, match="the image cannot be resized|height and width"):
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
def test_equals_native(size, native, each_backend):
    image = noise(*size)
    assert same(
        image_to_patches(image, CONFIG), native.load_image(image, **native_image.PARAMETERS)
    )


@pytest.mark.parametrize("patch", [4, 14])
def test_every_byte_value_and_every_place(patch, each_backend):
    """All 256 values in each channel, and a different value at each place of a patch."""
    values = torch.arange(256, dtype=torch.float32)
    expected = ((values / 255 - 0.5) / 0.5).to(torch.bfloat16)
    side = 4 * patch
    ramp = np.arange(side * side).reshape(side, side).astype(np.uint8)
    pixels_in = np.stack([ramp, ramp[::-1], ramp.T], axis=-1)
    assert all(len(np.unique(pixels_in[..., channel])) == 256 for channel in range(3))
    got = pixels.patches_of(Image.fromarray(pixels_in), (4, 4), patch, each_backend)
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
    assert unpadded_length((llm_h, llm_w)) + 3 <= 384
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
    config = sample_images.config(
        vision_max_n_token=budget,
        vision_patch_size=patch,
        vision_downsample_ratio=cell,
        vision_max_wh_ratio=ratio,
    )
    grid = vit_grid_for(width, height, config)
    assert min(grid) >= 1
    assert unpadded_length(llm_grid_of(grid, config)) + 3 <= budget


def test_a_budget_too_small_is_refused():
    config = sample_images.config(
        vision_max_n_token=10, vision_patch_size=1, vision_downsample_ratio=1
    )
    with pytest.raises(ValueError, match="no grid for 3x6 pixels fits vision_max_n_token 10"):
        vit_grid_for(3, 6, config)


def test_several_at_once_equal_one_by_one(each_backend):
    images = [noise(200 + 40 * index, 300 - 20 * index) for index in range(12)]
    together = images_to_patches(images, CONFIG, threads=4)
    for image, ours in zip(images, together, strict=True):
        alone = image_to_patches(image, CONFIG)
        assert torch.equal(ours.patches, alone.patches)
        assert (ours.vit_grid, ours.llm_grid) == (alone.vit_grid, alone.llm_grid)
    assert images_to_patches([], CONFIG) == []


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_one_undecoded_image_several_times(kind):
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
    with pytest.raises(ValueError, match="^image 1: the image is empty"):
        images_to_patches(images, CONFIG, threads=threads)
