from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import native_image
import pytest
import torch

from vision_exp.config import VisionConfigError
from vision_exp.layout import (
    END_ID,
    IMAGE_ID,
    NEWLINE_ID,
    PAD_ID,
    PLACEHOLDER_ID,
    RESERVED_IDS,
    SENTINEL_FIRST,
    SENTINELS,
    START_ID,
    TOKENS,
    TokenType,
    block_length,
    build_block,
    check_tokenizer,
    image_token_mask,
    leading_pads,
)

GOLDENS = json.loads(
    (Path(__file__).parents[1] / "goldens" / "image_layout.json").read_text(encoding="utf-8")
)["images"]


def sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda g: f"{g['width']}x{g['height']}")
def test_goldens(golden):
    grid = tuple(golden["llm_grid"])
    assert [block["start_pos_mod4"] for block in golden["blocks"]] == [0, 1, 2, 3]
    for block in golden["blocks"]:
        for start in (block["start_pos_mod4"], block["start_pos_mod4"] + 1000):
            built = build_block(grid, start)
            assert built.types.dtype == torch.int8
            assert built.perm.dtype == torch.int32
            assert len(built.types) == block["length"] == block_length(grid, start)
            assert sha256(built.types) == block["types_sha256"]
            assert sha256(built.perm) == golden["perm_sha256"]


def test_every_grid_of_the_budget_equals_the_native_block():
    """All grids up to 381 tokens, at one offset each in turn."""
    native = native_image.functions()
    grids = [(h, w) for h in range(1, 191) for w in range(1, 191) if block_length((h, w), 3) <= 381]
    assert len(grids) > 1000
    for index, (h, w) in enumerate(grids):
        types, perm = native.build_image_block(h, w, index % 4)
        block = build_block((h, w), index % 4)
        assert torch.equal(block.types.long(), types)
        assert torch.equal(block.perm.long(), perm)


def test_a_small_block_by_hand():
    """2 x 2 cells from position 1: two pads, START, cells column by column, trailing pads, END."""
    start, pad, image, newline, end = TokenType
    block = build_block((2, 2), 1)
    grid = [image, image, image, image, newline, newline]
    assert block.types.tolist() == [pad, pad, start, *grid, pad, pad, end]
    assert block.perm.tolist() == [0, 2, 1, 3]


@pytest.mark.parametrize("start", range(8))
def test_grid_starts_on_a_compressor_group(start):
    block = build_block((7, 14), start)
    first = block.types.tolist().index(TokenType.START)
    assert first == leading_pads(start)
    assert (start + first + 1) % 4 == 0
    assert (len(block.types) - first - 2) % 4 == 0


@pytest.mark.parametrize("grid", [(0, 3), (3, 0), (-1, 2)])
def test_empty_grid_is_refused(grid):
    with pytest.raises(ValueError, match="empty side"):
        build_block(grid, 0)


def test_negative_start_is_refused():
    with pytest.raises(ValueError, match="negative"):
        block_length((1, 1), -1)


def test_mask_takes_the_five_types_and_nothing_else():
    ids = torch.arange(SENTINEL_FIRST - 2, SENTINEL_FIRST + 8)
    assert ids[image_token_mask(ids)].tolist() == [SENTINEL_FIRST + kind for kind in TokenType]
    assert not image_token_mask(torch.tensor([PLACEHOLDER_ID])).any()


def test_names_and_ids_are_the_checkpoints():
    assert TOKENS == {
        "<｜deepseek_image｜>": 129264,
        "<|place_holder_mm_span_0431|>": 129257,
        "<|place_holder_mm_span_0432|>": 129258,
        "<|place_holder_mm_span_0433|>": 129259,
        "<|place_holder_mm_span_0434|>": 129260,
        "<|place_holder_mm_span_0435|>": 129261,
    }
    assert tuple(range(129257, 129262)) == (START_ID, PAD_ID, IMAGE_ID, NEWLINE_ID, END_ID)


def test_reserved_ids_are_the_five_types_and_the_placeholder():
    assert {SENTINEL_FIRST + kind for kind in TokenType} == SENTINELS
    assert {*SENTINELS, PLACEHOLDER_ID} == RESERVED_IDS


@pytest.mark.parametrize("name", TOKENS)
def test_a_tokenizer_that_maps_a_token_elsewhere_is_refused(name):
    check_tokenizer(None)
    check_tokenizer(SimpleNamespace(convert_tokens_to_ids=TOKENS.get))
    check_tokenizer(SimpleNamespace(convert_tokens_to_ids=lambda one: int(str(TOKENS[one]))))
    for other in (7, 200_000):
        moved = {**TOKENS, name: other}
        with pytest.raises(VisionConfigError, match=f"to {other}, not to"):
            check_tokenizer(SimpleNamespace(convert_tokens_to_ids=moved.get))
