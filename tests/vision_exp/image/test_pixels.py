"""Compiled loops from pixels to patches: the bits of Pillow's way, whatever the size."""

from __future__ import annotations

import numpy as np
import PIL
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from sample_images import noise

from vision_exp.image import backend, pixels, raw, resample
from vision_exp.image.pixels import PILLOW

PILLOW_RELEASE = int(PIL.__version__.split(".")[0])


def same(image: Image.Image, grid: tuple[int, int], stretch: bool = False) -> bool:
    """Whether both backends give equal bits, or both raise ValueError as an older Pillow does."""
    fitted = resample.fitted_size(image.size, (grid[1] * 14, grid[0] * 14))
    if PILLOW_RELEASE < 13 and not stretch and min(fitted) < 1:
        for one in (PILLOW, backend.warm_up()):
            with pytest.raises(ValueError, match="height and width must be > 0"):
                pixels.patches_of(image, grid, 14, one)
        return True
    plain, fast = (
        pixels.patches_of(image, grid, 14, one, stretch=stretch).view(torch.int16)
        for one in (PILLOW, backend.warm_up())
    )
    return fast.is_contiguous() and torch.equal(plain, fast)


#: Sides from 1 to 1,000 with as many small ones as large ones.
SIDES = st.floats(0, 3).map(lambda power: round(10**power))


@settings(max_examples=400, deadline=None)
@given(width=SIDES, height=SIDES, rows=st.integers(1, 24), columns=st.integers(1, 24))
@example(width=1, height=1, rows=1, columns=1)
@example(width=1, height=1000, rows=24, columns=1)
@example(width=1000, height=1, rows=1, columns=24)
@example(width=28, height=42, rows=3, columns=2)  # fits as it is
@example(width=28, height=40, rows=3, columns=2)  # one side fits
@example(width=26, height=42, rows=3, columns=2)
def test_any_size_equals_pillow(width, height, rows, columns):
    image = noise(width, height)
    assert same(image, (rows, columns), stretch=True)
    assert same(image, (rows, columns))


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((1920, 1080), (42, 74)),
        ((1080, 2400), (73, 33)),
        ((3840, 2160), (42, 74)),
        ((4001, 3001), (48, 65)),
        ((512, 4096), (95, 12)),
        ((20000, 30), (6, 560)),
        ((30, 20000), (560, 6)),
        ((resample.LONGEST, 3), (2, 40)),
        ((resample.LONGEST + 1, 3), (2, 40)),  # Pillow's own work
    ],
)
def test_large_sizes_equal_pillow(size, grid):
    assert same(noise(*size), grid)
    assert same(noise(*size), grid, stretch=True)


@settings(max_examples=200, deadline=None)
@given(
    width=SIDES,
    height=SIDES,
    rows=st.integers(1, 24),
    columns=st.integers(1, 24),
    piece=st.sampled_from([1, 5000]),
    block=st.sampled_from([1, 50_000]),
)
@example(width=40, height=500, rows=4, columns=3, piece=1, block=1)  # a vertical pass first
@example(width=100, height=3000, rows=33, columns=3, piece=5000, block=50_000)  # 15 rows, then 17
def test_how_the_rows_are_cut_changes_nothing(width, height, rows, columns, piece, block):
    image = noise(width, height)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pixels, "_PIECE", piece)
        patch.setattr(pixels, "_BLOCK", block)
        assert same(image, (rows, columns), stretch=True)
        assert same(image, (rows, columns))


def test_passes_change_places_where_pillow_changes_them():
    """Around the place: a height that shrinks by twice what the width shrinks by."""
    for narrower in (-3, -1, 0, 1, 4):
        for shorter in range(max(0, 2 * narrower - 2), max(0, 2 * narrower) + 3):
            image = noise(28 + narrower, 28 + shorter)
            assert same(image, (2, 2), stretch=True), (narrower, shorter)


def test_values_at_the_ends_are_clipped():
    """Black and white checks overshoot both ways when they are resampled."""
    checks = np.indices((90, 130)).sum(0) // 5 % 2 * 255
    image = Image.fromarray(np.stack([checks, 255 - checks, checks], -1).astype(np.uint8))
    assert same(image, (3, 5))
    assert same(image, (12, 15))


@pytest.mark.parametrize("size", [(900, 700), (33, 44)])
def test_an_image_that_another_thread_changes_meanwhile(monkeypatch, size):
    """Its size and its pixels stay those it had: loops that write by another size would crash."""
    image, grid = noise(300, 200), (6, 9)
    expected = pixels.patches_of(image.copy(), grid, 14, PILLOW)
    coefficients = resample.filter_coefficients

    def meanwhile(old, new):
        image.im, image._size = noise(*size).im, size
        return coefficients(old, new)

    monkeypatch.setattr(resample, "filter_coefficients", meanwhile)
    assert torch.equal(pixels.patches_of(image, grid, 14, backend.warm_up()), expected)


@pytest.mark.parametrize("size", [(1, 1), (3, 700), (40_000, 2), (1036, 588)])
@pytest.mark.parametrize("rows", [1, 3, 588])
def test_raw_pieces_are_those_of_tobytes(size, rows):
    image = noise(*size)
    pieces = list(raw.pieces(image, "RGB", rows))
    assert b"".join(pieces) == image.tobytes()
    assert {len(piece) for piece in pieces[:-1]} <= {rows * 3 * image.width}
    assert len(pieces) == -(-image.height // rows)
