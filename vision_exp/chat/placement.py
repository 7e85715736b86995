"""Where the blocks of a prompt's images go: to their placeholders, or where they stand already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vision_exp.layout import (
    PAD_ID,
    PLACEHOLDER,
    PLACEHOLDER_ID,
    RESERVED_IDS,
    SENTINEL_FIRST,
    SENTINEL_LAST,
    SENTINELS,
    leading_pads,
)


@dataclass(frozen=True)
class Placed:
    """One image's block in a prompt: its first position, its token ids with leading pads."""

    start: int
    tokens: list[int]


def place(token_ids: list[int], blocks: Sequence[list[int]]) -> tuple[list[int], list[Placed]]:
    """The prompt with the k-th image's block (START to END) at its k-th placeholder.

    A prompt that has been here before, such as a prefill server's, has blocks instead; one that is
    what this image gets at this position stays as it is. Raises ValueError for any other number of
    images and for any other reserved id.
    """
    replayed = not SENTINELS.isdisjoint(token_ids)
    found = token_ids.count(PLACEHOLDER_ID)
    if not replayed and found != len(blocks):
        raise ValueError(
            f"the prompt has {found} image placeholders ({PLACEHOLDER}) for {len(blocks)} images"
        )
    out: list[int] = []
    placed: list[Placed] = []
    copied = 0
    for number, unpadded in enumerate(blocks):
        here = (
            _next_reserved(token_ids, copied)
            if replayed
            else token_ids.index(PLACEHOLDER_ID, copied)
        )
        out += token_ids[copied:here]
        block = [PAD_ID] * leading_pads(len(out)) + unpadded
        if token_ids[here : here + 1] == [PLACEHOLDER_ID]:
            copied = here + 1
        elif token_ids[here : here + len(block)] == block:
            copied = here + len(block)
        else:
            raise ValueError(
                f"the prompt does not have the block of image {number} at position {here}: token "
                f"ids {SENTINEL_FIRST} to {SENTINEL_LAST} are reserved for images, and only those "
                "that this server made of the same images are taken back"
            )
        placed.append(Placed(len(out), block))
        out += block
    rest = _next_reserved(token_ids, copied) if replayed else len(token_ids)
    if rest < len(token_ids):
        raise ValueError(
            f"the prompt has token {token_ids[rest]} at position {rest}, beside the blocks of its "
            f"{len(blocks)} images: token ids {SENTINEL_FIRST} to {SENTINEL_LAST} are reserved"
        )
    return out + token_ids[copied:], placed


def _next_reserved(token_ids: list[int], start: int) -> int:
    """Position of the first reserved id from `start` on; the prompt's length if there is none."""
    later = range(start, len(token_ids))
    return next((i for i in later if token_ids[i] in RESERVED_IDS), len(token_ids))
