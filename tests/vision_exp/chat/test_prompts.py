"""Prompts and processed requests with reserved ids, without an engine."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import tiny_config
import torch

from vision_exp.chat import prompts
from vision_exp.layout import (
    END_ID,
    PLACEHOLDER,
    PLACEHOLDER_ID,
    SENTINEL_FIRST,
    TokenType,
    build_block,
)

VISION = SimpleNamespace(**tiny_config.vision_config())
TEXT = SimpleNamespace(**tiny_config.text_config())
GRID = (3, 4)
IMAGE = SENTINEL_FIRST + TokenType.IMAGE


class Refused(Exception):
    """Stands for VLLMValidationError, which is no ValueError on every release."""


@pytest.fixture(autouse=True)
def vllm_exceptions(monkeypatch):
    module = ModuleType("vllm.exceptions")
    module.VLLMValidationError = Refused
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.exceptions", module)


@dataclass(frozen=True)
class Range:
    """Stands for vLLM's PlaceholderRange."""

    offset: int
    length: int
    is_embed: torch.Tensor | None = None


def request(*offsets, ids=(), trace=None):
    """A processed request with an image block at each offset, nines around and `ids` at its end."""
    prompt, features = [], []
    for offset in offsets:
        prompt += [9] * (offset - len(prompt))
        types = build_block(GRID, offset).types.to(torch.int64) + SENTINEL_FIRST
        place = Range(offset, len(types), types == IMAGE)
        features.append(SimpleNamespace(modality="image", mm_position=place, data=None))
        prompt += types.tolist()
    parameters = SimpleNamespace(trace_decode_token_ids=trace)
    return SimpleNamespace(
        prompt_token_ids=[*prompt, *ids], mm_features=features, sampling_params=parameters
    )


@pytest.mark.parametrize("offsets", [(), (5,), (5, 40), (0, 100, 200)])
def test_what_the_processor_makes_passes(offsets):
    made = request(*offsets, ids=(9, 9))
    prompts.check_processed(made, VISION)
    made.mm_features.reverse()
    prompts.check_processed(made, VISION)


def test_a_request_without_prompt_ids_or_sampling_passes():
    nothing = SimpleNamespace(prompt_token_ids=None, mm_features=None, sampling_params=None)
    prompts.check_processed(nothing, VISION)


@pytest.mark.parametrize("token", [IMAGE, PLACEHOLDER_ID])
@pytest.mark.parametrize("offsets", [(), (5,)])
def test_a_reserved_id_beside_blocks_is_refused_with_its_name_and_position(token, offsets):
    made = request(*offsets, ids=(9, token))
    position = len(made.prompt_token_ids) - 1
    with pytest.raises(Refused, match=rf"token {token} \(.*\) at position {position}, which is"):
        prompts.check_processed(made, VISION)
    prompts.check_processed(made, TEXT)


def test_a_reserved_id_before_a_block_is_refused():
    made = request(5, 40)
    made.prompt_token_ids[38] = IMAGE
    with pytest.raises(Refused, match="at position 38"):
        prompts.check_processed(made, VISION)


def test_two_images_at_one_place_are_refused():
    made = request(5)
    made.mm_features *= 2
    with pytest.raises(Refused, match="two images share the token at position 5"):
        prompts.check_processed(made, VISION)


def test_tokens_that_a_replayed_request_pretends_to_have_generated_are_checked():
    prompts.check_processed(request(trace=[1, 2]), VISION)
    with pytest.raises(Refused, match=f"token {IMAGE}"):
        prompts.check_processed(request(trace=[1, IMAGE]), VISION)


def test_lost_marks_of_rows_are_restored():
    made = request(5, 40)
    expected = [feature.mm_position.is_embed for feature in made.mm_features]
    for feature in made.mm_features:
        place = feature.mm_position
        feature.mm_position = Range(place.offset, place.length)
    prompts.check_processed(made, VISION)
    for feature, is_embed in zip(made.mm_features, expected, strict=True):
        assert feature.mm_position.is_embed.equal(is_embed)


def test_placeholders_may_stand_beside_images_only():
    ids = {"prompt_token_ids": [5, PLACEHOLDER_ID]}
    prompts.check_prompt({**ids, "multi_modal_data": {"image": [object()]}})
    prompts.check_prompt({"prompt": "text alone"})
    with pytest.raises(Refused, match="token 129264"):
        prompts.check_prompt(ids)
    # What stands beside images is the processor's to judge (chat/placement.py).
    prompts.check_prompt({"prompt_token_ids": [IMAGE], "multi_modal_data": {"image": [0]}})


@pytest.mark.parametrize(("left", "refused"), [(0, True), (1, True), (2, False)])
def test_truncation_that_cuts_an_image_is_named(left, refused):
    text = {"prompt": PLACEHOLDER * 2, "multi_modal_data": {"image": [0, 1]}}
    cut = {**text, "prompt_token_ids": [PLACEHOLDER_ID] * left}
    if not refused:
        prompts.check_prompt(cut)
        prompts.check_prompt({**text, "prompt_token_ids": [END_ID, 5, END_ID]})  # a replay
        return
    with pytest.raises(Refused, match=f"truncate_prompt_tokens cuts {2 - left} of"):
        prompts.check_prompt(cut)
    # Without its text, nobody knows what was cut.
    prompts.check_prompt({**cut, "prompt": None})
