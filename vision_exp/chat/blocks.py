"""Checks that processed images and the token ids of a prompt fit each other, exactly.

After this nothing about a request's shape can make the tower or the merge of its rows fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vision_exp.config import VisionConfig
from vision_exp.layout import (
    END_ID,
    IMAGE_ID,
    PAD_ID,
    SENTINEL_FIRST,
    START_ID,
    build_block,
    leading_pads,
)


def check_feature(ids: Sequence[int], feature: Any, config: VisionConfig) -> None:
    """Check one image feature of a request against the prompt's ids.

    `feature`: vLLM's MultiModalFeatureSpec. Its data may be absent, where a cache on the other
    side holds it; then only the block is checked. Raises ValueError saying what does not fit.
    """
    place = feature.mm_position
    block = ids[place.offset : place.offset + place.length]
    if feature.modality != "image":
        raise ValueError(f"the model reads images, not {feature.modality}")
    if not _looks_like_a_block(block, place.offset):
        raise ValueError(f"the tokens at position {place.offset} are not the block of an image")
    expected = [token == IMAGE_ID for token in block]
    marked = place.is_embed
    if marked is None or marked.tolist() != expected:
        raise ValueError(f"the image at position {place.offset} marks other tokens than its rows")
    data = feature.data
    if data is None or "llm_grid" not in data:
        return
    values = {name: data[name].data for name in ("patches", "vit_grid", "llm_grid", "perm")}
    problem = _problem(block, place.offset, values, config)
    if problem:
        raise ValueError(f"the image at position {place.offset}: {problem}")


def _looks_like_a_block(block: Sequence[int], offset: int) -> bool:
    """Pads up to the alignment, START, a grid of image tokens, END."""
    pads = leading_pads(offset)
    inner = block[pads + 1 : -1]
    return (
        len(block) > pads + 2
        and all(token == PAD_ID for token in block[:pads])
        and block[pads] == START_ID
        and block[-1] == END_ID
        and IMAGE_ID in inner
        and all(START_ID < token < END_ID for token in inner)
    )


def _problem(
    block: Sequence[int], offset: int, values: dict[str, torch.Tensor], config: VisionConfig
) -> str | None:
    """What does not fit in one image's tensors (see processor.py); None if all does."""
    vit, llm = values["vit_grid"].tolist(), values["llm_grid"].tolist()
    ratio = config.downsample_ratio
    if min(vit) < 1 or llm != [-(-side // ratio) for side in vit]:
        return f"grids {vit} and {llm} do not belong together"
    types = build_block((llm[0], llm[1]), offset).types.to(torch.int64) + SENTINEL_FIRST
    if types.tolist() != list(block):
        return f"its grid {llm} gives another block"
    shape = (vit[0] * vit[1], 3, config.patch_size, config.patch_size)
    patches, perm = values["patches"], values["perm"]
    if tuple(patches.shape) != shape or not patches.is_floating_point():
        return f"patches {tuple(patches.shape)} {patches.dtype}, expected {shape} of a float type"
    if not torch.equal(perm.sort().values, torch.arange(llm[0] * llm[1], dtype=perm.dtype)):
        return "the order of its rows is no permutation"
    return None
