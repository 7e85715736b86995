"""Numbers and arrays as images: ranges that are known are scaled, shapes with one reading taken."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sample_images import noise

from vision_exp.image.convert import to_rgb
from vision_exp.image.values import image_of, to_bytes

BYTES = np.arange(256, dtype=np.uint8).reshape(16, 16)


def shown(value) -> np.ndarray:
    return np.asarray(to_rgb(image_of(value)))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_fractions_of_255_give_the_bytes_back(dtype) -> None:
    assert np.array_equal(shown((BYTES / 255).astype(dtype))[..., 1], BYTES)
    assert np.array_equal(shown(torch.from_numpy((BYTES / 255).astype(dtype)))[..., 1], BYTES)


@pytest.mark.parametrize("dtype", [np.uint16, np.int16, np.int64, np.float16, np.float64])
def test_bytes_of_another_type_stay(dtype) -> None:
    assert np.array_equal(shown(BYTES.astype(dtype))[..., 1], BYTES)


def test_black_and_white_are_that() -> None:
    assert shown(np.array([[False, True]]))[0, :, 0].tolist() == [0, 255]


def test_a_dark_part_has_the_scale_of_its_image() -> None:
    part = np.array([[0, 255, 256]], np.uint16)
    assert to_bytes(part[:, :2], 0, 65535, 65535).tolist() == [[0, 0]]
    assert to_bytes(part, 0, 256, 65535).tolist() == [[0, 0, 1]]


def test_a_gradient_of_16_bit_stays_a_gradient() -> None:
    wide = np.linspace(0, 65535, 4096).astype(np.uint16).reshape(64, 64)
    grey = shown(wide)[..., 0].ravel()
    assert grey[0] == 0 and grey[-1] == 255 and len(np.unique(grey)) == 256
    assert np.abs(grey - wide.ravel() * (255 / 65535)).max() <= 1


@pytest.mark.parametrize(
    "values",
    [[-1, 5], [0, 256], [0.5, 255.5], [-0.1, 1], [np.nan, 1], [0, np.inf]],
)
def test_ranges_that_are_unknown_are_refused(values) -> None:
    with pytest.raises(ValueError, match="^its values go from .*: scale them to 0 to 1, or 0 to"):
        image_of(np.array([values], np.float64))


@given(st.integers(5, 9), st.integers(5, 9), st.sampled_from([1, 2, 3, 4]))
def test_channels_may_be_first_or_last(height: int, width: int, channels: int) -> None:
    mode = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}[channels]
    image = noise(width, height, mode)
    last = np.asarray(image).reshape(height, width, channels)
    for array in (last, np.moveaxis(last, 2, 0)):
        made = image_of(array)
        assert (made.mode, made.size) == (mode, (width, height))
        assert made.tobytes() == image.tobytes()


def test_three_by_six_by_four_is_rgb() -> None:
    array = np.zeros((3, 6, 4), np.uint8)
    array[2] = 255
    made = image_of(array)
    assert (made.mode, made.size, made.getpixel((0, 0))) == ("RGB", (4, 6), (0, 0, 255))


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((3, 6, 3), "first or last: pass a PIL image"),
        ((1, 6, 3), "first or last"),
        ((4, 6, 4), "first or last"),
        ((5, 6, 7), "is no image: expected"),
        ((9,), "is no image"),
        ((2, 3, 6, 4), "is no image"),
        ((0, 6, 3), "empty"),
    ],
)
def test_shapes_of_no_one_reading_are_refused(shape, reason) -> None:
    with pytest.raises(ValueError, match=reason):
        image_of(np.zeros(shape, np.uint8))


@pytest.mark.parametrize("value", [np.zeros((4, 4), complex), np.array([["a"]]), "text", [[1]]])
def test_what_is_no_numbers_is_refused(value) -> None:
    with pytest.raises(ValueError, match="is no image|expected a URL, a PIL image or an array"):
        image_of(value)
