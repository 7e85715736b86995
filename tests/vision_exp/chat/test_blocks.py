"""Image features against prompt ids, without an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tiny_config
import torch

from vision_exp.chat.blocks import check_feature
from vision_exp.config import VisionConfig
from vision_exp.layout import SENTINEL_FIRST, TokenType, build_block

CONFIG = VisionConfig.from_hf_config(SimpleNamespace(**tiny_config.VISION_EXP))
IMAGE = SENTINEL_FIRST + TokenType.IMAGE
VIT, LLM = (7, 11), (3, 4)


def feature(offset=5, **changes):
    """(ids, feature) of one image at `offset`, with some of its values changed."""
    block = build_block(LLM, offset)
    inner = (block.types.to(torch.int64) + SENTINEL_FIRST).tolist()
    values = {
        "patches": torch.zeros(VIT[0] * VIT[1], 3, 14, 14, dtype=torch.bfloat16),
        "vit_grid": torch.tensor(VIT),
        "llm_grid": torch.tensor(LLM),
        "perm": block.perm,
    }
    values.update({k: v for k, v in changes.items() if k in values})
    place = SimpleNamespace(
        offset=offset,
        length=len(inner),
        is_embed=changes.get("is_embed", torch.tensor(inner) == IMAGE),
    )
    ids = [9] * offset + changes.get("block", inner) + [9, 9]
    data = changes.get("data", {k: SimpleNamespace(data=v) for k, v in values.items()})
    modality = changes.get("modality", "image")
    return ids, SimpleNamespace(modality=modality, mm_position=place, data=data)


@pytest.mark.parametrize("offset", range(4, 9))
def test_what_the_processor_makes_is_right(offset):
    check_feature(*feature(offset), CONFIG)


def test_absent_data_is_not_judged():
    check_feature(*feature(data=None), CONFIG)


RIGHT, _ = feature()
BLOCK = RIGHT[5:-2]


def changed(position, token):
    block = list(BLOCK)
    block[position] = token
    return block


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"modality": "video"}, "video"),
        ({"block": changed(0, IMAGE)}, "not the block"),
        ({"block": changed(-1, IMAGE)}, "not the block"),
        ({"block": changed(6, 9)}, "not the block"),
        ({"block": [9, *BLOCK[:-1]]}, "not the block"),
        ({"is_embed": None}, "marks"),
        ({"is_embed": torch.ones(len(BLOCK), dtype=torch.bool)}, "marks"),
        ({"vit_grid": torch.tensor([7, 14])}, "belong together"),
        ({"vit_grid": torch.tensor([0, 11])}, "belong together"),
        ({"llm_grid": torch.tensor([4, 3]), "vit_grid": torch.tensor([11, 7])}, "another block"),
        ({"patches": torch.zeros(76, 3, 14, 14)}, "patches"),
        ({"patches": torch.zeros(77, 3, 14, 14, dtype=torch.int32)}, "patches"),
        ({"perm": torch.zeros(12, dtype=torch.int32)}, "permutation"),
        ({"perm": torch.arange(11, dtype=torch.int32)}, "permutation"),
    ],
)
def test_what_does_not_fit_is_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        check_feature(*feature(**changes), CONFIG)


def test_a_block_with_the_right_number_of_rows_in_the_wrong_places_is_refused():
    swapped = list(BLOCK)
    row = swapped.index(IMAGE)
    newline = swapped.index(SENTINEL_FIRST + TokenType.NEWLINE)
    swapped[row], swapped[newline] = swapped[newline], swapped[row]
    marks = torch.tensor(swapped) == IMAGE
    with pytest.raises(ValueError, match="another block"):
        check_feature(*feature(block=swapped, is_embed=marks), CONFIG)
