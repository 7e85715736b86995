"""Placeholders and blocks in a prompt, without vLLM."""

from __future__ import annotations

import pytest

from vision_exp.chat.placement import Placed, place
from vision_exp.layout import (
    END_ID,
    GROUP,
    IMAGE_ID,
    NEWLINE_ID,
    PAD_ID,
    PLACEHOLDER_ID,
    SENTINEL_FIRST,
    START_ID,
    build_block,
)

TEXT = list(range(5, 40))


def block(*grid: int) -> list[int]:
    return [SENTINEL_FIRST + kind for kind in build_block(grid, GROUP - 1).types.tolist()]


ONE, TWO = block(2, 3), block(5, 2)


@pytest.mark.parametrize("before", range(5))
@pytest.mark.parametrize("between", range(5))
def test_what_was_made_of_placeholders_is_taken_back(before, between):
    prompt = [*TEXT[:before], PLACEHOLDER_ID, *TEXT[:between], PLACEHOLDER_ID, 7]
    made, placed = place(prompt, [ONE, TWO])
    for one, tokens in zip(placed, (ONE, TWO), strict=True):
        assert made[one.start : one.start + len(one.tokens)] == one.tokens
        assert one.tokens == [PAD_ID] * ((GROUP - 1 - one.start) % GROUP) + tokens
    assert place(made, [ONE, TWO]) == (made, placed)
    # One of them alone may have been here before.
    half = [*made[: placed[1].start], PLACEHOLDER_ID, 7]
    assert place(half, [ONE, TWO]) == (made, placed)


def test_a_prompt_without_images():
    assert place(TEXT, []) == (TEXT, [])
    assert place([PLACEHOLDER_ID], [ONE])[1] == [Placed(0, [PAD_ID] * 3 + ONE)]


MADE, (FIRST, SECOND) = place([9, PLACEHOLDER_ID, 9, 9, PLACEHOLDER_ID, 9], [ONE, TWO])
INSIDE = FIRST.start + len(FIRST.tokens) - 2


@pytest.mark.parametrize(
    ("prompt", "blocks", "message"),
    [
        ([5, PLACEHOLDER_ID], [], "1 image placeholders .* for 0 images"),
        ([5], [ONE], "0 image placeholders .* for 1 images"),
        ([5, START_ID], [], "token 129257 at position 1, beside the blocks of its 0 images"),
        (MADE, [ONE], "beside the blocks of its 1 images"),
        (MADE, [ONE, TWO, TWO], f"block of image 2 at position {len(MADE)}"),
        (MADE, [TWO, ONE], f"block of image 0 at position {FIRST.start}"),
        ([9, *MADE], [ONE, TWO], "block of image 0 at position 2"),
        (MADE[:-2], [ONE, TWO], f"block of image 1 at position {SECOND.start}"),
        ([*MADE[:INSIDE], IMAGE_ID, *MADE[INSIDE + 1 :]], [ONE, TWO], "block of image 0"),
        ([*MADE, NEWLINE_ID], [ONE, TWO], f"at position {len(MADE)}, beside"),
        ([*MADE, PLACEHOLDER_ID], [ONE, TWO], f"token {PLACEHOLDER_ID} at position {len(MADE)}"),
        ([END_ID, PLACEHOLDER_ID], [ONE], "block of image 0 at position 0"),
    ],
)
def test_everything_else_is_refused(prompt, blocks, message):
    assert MADE[INSIDE] != IMAGE_ID
    with pytest.raises(ValueError, match=message):
        place(prompt, blocks)
