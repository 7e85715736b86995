"""Requests with small pictures as the front end hands them to the engine: items, blocks, hashes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import BatchFeature
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItems, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from vision_exp.layout import IMAGE_ID, PAD_ID, leading_pads
from vision_exp.model.processor import VisionExpProcessor, unpadded_ids

Grid = tuple[int, int]


def item(value: float, grid: Grid) -> Any:
    """The model's input for a picture whose every pixel is `value`, of `grid` aligner rows."""
    height, width = grid
    fields = BatchFeature(
        {
            "patches": torch.full((4 * height * width, 3, 14, 14), value),
            "vit_grid": torch.tensor([[2 * height, 2 * width]]),
            "llm_grid": torch.tensor([[height, width]]),
            "perm": torch.arange(height * width, dtype=torch.int32),
        }
    )
    maker: Any = VisionExpProcessor._get_mm_fields_config
    return MultiModalKwargsItems.from_hf_inputs(fields, maker(None, fields, {}))["image"][0]


def request(
    name: str,
    pictures: Sequence[float],
    hasher: Any,
    *,
    seed: int = 0,
    before: int = 70,
    after: int = 70,
    tokens: int = 4,
    grid: Grid = (2, 2),
    key: str | None = None,
) -> Request:
    """A prompt of text, each picture followed by `after` tokens of text; `key` renames pictures."""
    text = (1000 + (seed * 31 + i * 7) % 500 for i in itertools.count())
    ids = list(itertools.islice(text, before))
    features = []
    for value in pictures:
        block = [PAD_ID] * leading_pads(len(ids)) + unpadded_ids(*grid)
        place = PlaceholderRange(len(ids), len(block), torch.tensor(block) == IMAGE_ID)
        identifier = key or str(value)
        features.append(
            MultiModalFeatureSpec(item(value, grid), "image", identifier, place, identifier)
        )
        ids += block
        ids += itertools.islice(text, after)
    return Request(
        request_id=name,
        prompt_token_ids=ids,
        sampling_params=SamplingParams(max_tokens=tokens, ignore_eos=True),
        pooling_params=None,
        mm_features=features,
        block_hasher=hasher,
    )
