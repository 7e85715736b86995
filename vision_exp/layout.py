"""How one image lies in the prompt: token types, block length, order of the tower's rows.

Every image placeholder of a prompt becomes one *block*::

    PAD * (3 - start % 4)  START  grid  [PAD PAD]  END

The grid is the image's LLM grid, each row closed by a NEWLINE and an odd last row completed by a
row of PAD. Rows are taken in pairs and read column by column (upper cell, lower cell, next
column), so that the model's key-value compressor, which folds four consecutive positions, folds
2 x 2 cells. The leading pads put START on a position that is 3 modulo 4 and the trailing pads make
the grid a multiple of 4, so groups never straddle a block.

Pure functions on the CPU; everything here depends on the grid and the start position alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from vision_exp.config import VisionConfigError

#: Compressor group: START lies at ``GROUP - 1`` modulo ``GROUP``.
GROUP = 4

#: Id of the one token that stands for an image before the processor expands it.
PLACEHOLDER_ID = 129264

#: The five token types borrow consecutive reserved ids: ``id = SENTINEL_FIRST + type``.
SENTINEL_FIRST = 129257


class TokenType(IntEnum):
    """Role of a token inside an image block."""

    START = 0
    PAD = 1
    IMAGE = 2
    NEWLINE = 3
    END = 4


SENTINEL_LAST = SENTINEL_FIRST + len(TokenType) - 1
SENTINELS = frozenset(range(SENTINEL_FIRST, SENTINEL_LAST + 1))
START_ID, PAD_ID, IMAGE_ID, NEWLINE_ID, END_ID = (SENTINEL_FIRST + kind for kind in TokenType)

#: What stands for one image in a prompt's text.
PLACEHOLDER = "<｜deepseek_image｜>"

#: The placeholder and the five reserved tokens that image blocks borrow, with their ids.
TOKENS = {PLACEHOLDER: PLACEHOLDER_ID} | {
    f"<|place_holder_mm_span_{431 + kind:04}|>": SENTINEL_FIRST + kind for kind in TokenType
}

#: Ids that no text of a prompt may have.
RESERVED_IDS = frozenset(TOKENS.values())


@dataclass(frozen=True)
class Block:
    """One image block in prompt order.

    ``types``: int8 (length,), values of TokenType. ``perm``: int32 (h * w,); the k-th IMAGE
    position of the block takes row ``perm[k]`` of the aligner's output, which is in raster order.
    """

    types: torch.Tensor
    perm: torch.Tensor


def leading_pads(start_pos: int) -> int:
    """Number of PAD tokens (0 to 3) before START when the block begins at ``start_pos``."""
    return GROUP - 1 - start_pos % GROUP


def unpadded_length(llm_grid: tuple[int, int]) -> int:
    """Tokens from START to END inclusive, without the leading pads."""
    pairs, row, trailing = _shape(llm_grid)
    return 2 * pairs * row + trailing + 2


def block_length(llm_grid: tuple[int, int], start_pos: int) -> int:
    """Tokens of the whole block of an ``(h, w)`` LLM grid beginning at position ``start_pos``.

    Raises ValueError on a side below 1 or a negative position.
    """
    if start_pos < 0:
        raise ValueError(f"start position {start_pos} is negative")
    return leading_pads(start_pos) + unpadded_length(llm_grid)


def build_block(llm_grid: tuple[int, int], start_pos: int) -> Block:
    """The block of an ``(h, w)`` LLM grid that begins at prompt position ``start_pos``.

    ``block_length(llm_grid, start_pos)`` tokens. Raises ValueError like block_length.
    """
    length = block_length(llm_grid, start_pos)
    pairs, row, _ = _shape(llm_grid)
    height, width = llm_grid
    cells = torch.full((2 * pairs, row), int(TokenType.PAD), dtype=torch.int8)
    cells[:height, :width] = TokenType.IMAGE
    cells[:height, width] = TokenType.NEWLINE
    rows = torch.full((2 * pairs, row), -1, dtype=torch.int32)
    rows[:height, :width] = torch.arange(height * width, dtype=torch.int32).view(height, width)

    types = torch.full((length,), int(TokenType.PAD), dtype=torch.int8)
    start = leading_pads(start_pos)
    types[start] = TokenType.START
    types[start + 1 : start + 1 + cells.numel()] = _pairwise(cells)
    types[-1] = TokenType.END
    order = _pairwise(rows)
    return Block(types=types, perm=order[order >= 0])


def image_token_mask(token_ids: torch.Tensor) -> torch.Tensor:
    """Bool tensor: which ids are one of the five image token types.

    Valid only where sentinel ids can come from the processor alone (it refuses them elsewhere).
    """
    return (token_ids >= SENTINEL_FIRST) & (token_ids <= SENTINEL_LAST)


def _shape(llm_grid: tuple[int, int]) -> tuple[int, int, int]:
    """(row pairs, tokens in a row, trailing pads) of a grid."""
    height, width = llm_grid
    if height < 1 or width < 1:
        raise ValueError(f"LLM grid {height}x{width} has an empty side")
    pairs, row = (height + 1) // 2, width + 1
    return pairs, row, pairs * row % 2 * 2


def _pairwise(cells: torch.Tensor) -> torch.Tensor:
    """Cells (2 * pairs, row) flattened pair by pair, column by column."""
    return cells.view(-1, 2, cells.shape[1]).transpose(1, 2).reshape(-1)


def check_tokenizer(tokenizer: Any) -> None:
    """Check that the special tokens have the ids that the layout assumes.

    `tokenizer` may be None (skip_tokenizer_init). Raises VisionConfigError naming the token.
    """
    if tokenizer is None:
        return
    for name, expected in TOKENS.items():
        found = tokenizer.convert_tokens_to_ids(name)
        if found != expected:
            raise VisionConfigError(f"the tokenizer maps {name!r} to {found}, not to {expected}")
