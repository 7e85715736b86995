"""Refuses prompts that hold the ids of image tokens where the processor did not put them.

Routing, embedding and visibility take the five sentinel ids for image rows, so no client may
place them: not as raw token ids, not by typing the names of the tokens into a completion. Acts
for vision checkpoints only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from vision_exp import patching
from vision_exp.chat.blocks import check_feature
from vision_exp.chat.hooks import bad_request
from vision_exp.chat.reserved import RESERVED_IDS
from vision_exp.config import VisionConfig, is_vision_exp
from vision_exp.layout import PLACEHOLDER_ID, SENTINEL_FIRST, TOKENS, TokenType

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.renderers.base:BaseRenderer.process_for_engine(prompt)",
    "vllm.renderers.base:BaseRenderer.process_for_engine_async(prompt)",
    "vllm.renderers.base:BaseRenderer.model_config",
    "vllm.v1.engine.core:EngineCore.preprocess_add_request(request)",
    "vllm.v1.engine.core:EngineCore.vllm_config",
    "vllm.v1.engine:EngineCoreRequest.prompt_token_ids",
    "vllm.v1.engine:EngineCoreRequest.mm_features",
    "vllm.v1.engine:EngineCoreRequest.sampling_params",
    "vllm.multimodal.inputs:MultiModalFeatureSpec.mm_position",
    "vllm.multimodal.inputs:PlaceholderRange.offset",
    "vllm.multimodal.inputs:PlaceholderRange.length",
    "vllm.multimodal.inputs:MultiModalFeatureSpec.modality",
    "vllm.multimodal.inputs:PlaceholderRange.is_embed",
)

_NAMES = {token_id: name for name, token_id in TOKENS.items()}
IMAGE_ID = SENTINEL_FIRST + TokenType.IMAGE
_SENTINELS = RESERVED_IDS - {PLACEHOLDER_ID}


def install() -> None:
    """Wrap two of the three places that every prompt passes, once they are imported.

    The renderer, before anything is processed: an error there is an HTTP status even for streams.
    The API server's input processor, which also gets what another server rendered: its wrapper in
    engine/hooks.py calls `check_processed`. The engine's preprocessing, where cached image data is
    back: an error there ends that one request.
    """
    patching.when_imported("vllm.renderers.base", _wrap_renderer)
    patching.when_imported("vllm.v1.engine.core", _wrap_engine_core)


def _wrap_renderer(module: ModuleType) -> None:
    patching.wrap(module.BaseRenderer, "process_for_engine", _process_for_engine)
    patching.wrap(module.BaseRenderer, "process_for_engine_async", _process_for_engine_async)


def _wrap_engine_core(module: ModuleType) -> None:
    patching.wrap(module.EngineCore, "preprocess_add_request", _preprocess_add_request)


def _process_for_engine(original: Any, self: Any, prompt: Any, *args: Any, **kwargs: Any) -> Any:
    if is_vision_exp(self.model_config.hf_config):
        check_prompt(prompt)
    return original(self, prompt, *args, **kwargs)


async def _process_for_engine_async(
    original: Any, self: Any, prompt: Any, *args: Any, **kwargs: Any
) -> Any:
    if is_vision_exp(self.model_config.hf_config):
        check_prompt(prompt)
    return await original(self, prompt, *args, **kwargs)


def check_processed(request: Any, hf_config: Any) -> None:
    """Check what the API server's input processor made. Raises what maps to HTTP 400."""
    restore_marks(request)
    check_request(request, hf_config)
    # Tokens that a replayed request pretends to have generated.
    _refuse(getattr(request.sampling_params, "trace_decode_token_ids", None) or (), 0)


def _preprocess_add_request(original: Any, self: Any, request: Any) -> Any:
    hf_config = self.vllm_config.model_config.hf_config
    if not request.mm_features or not is_vision_exp(hf_config):
        return original(self, request)
    restore_marks(request)
    done = original(self, request)  # fills in image data that the API server knew to be cached
    check_request(request, hf_config)
    return done


def restore_marks(request: Any) -> None:
    """Mark the rows of images whose marks got lost between servers.

    vLLM sends a rendered prompt's placeholders without `is_embed`, which would then count START,
    pads, newlines and END among the tower's rows. The ids say which are.
    """
    for feature in request.mm_features or ():
        place = feature.mm_position
        if feature.modality == "image" and place.is_embed is None:
            ids = request.prompt_token_ids[place.offset : place.offset + place.length]
            marks = torch.tensor(ids) == IMAGE_ID
            feature.mm_position = dataclasses.replace(place, is_embed=marks)


def check_prompt(prompt: Any) -> None:
    """Check a prompt that is about to be processed. Raises what maps to HTTP 400.

    Placeholders may stand only beside images; the processor compares their number.
    """
    ids = prompt.get("prompt_token_ids") or ()
    _refuse(ids, 0, _SENTINELS if prompt.get("multi_modal_data") else RESERVED_IDS)


def check_request(request: Any, hf_config: Any) -> None:
    """Check a processed request: `prompt_token_ids`, and `mm_features` with the image blocks.

    Every block must fit its image and the ids beside blocks may not be reserved. Raises what maps
    to HTTP 400.
    """
    ids = request.prompt_token_ids or ()
    done = 0
    images = [f for f in request.mm_features or () if f.modality != "prompt_embeds"]
    for feature in sorted(images, key=lambda f: f.mm_position.offset):
        place = feature.mm_position
        _refuse(ids[done : place.offset], done)
        try:
            if place.offset < done:
                raise ValueError(f"two images share the token at position {place.offset}")
            check_feature(ids, feature, VisionConfig.from_hf_config(hf_config))
        except ValueError as error:
            raise bad_request(str(error)) from error
        done = place.offset + place.length
    _refuse(ids[done:] if done else ids, done)


def _refuse(ids: Sequence[int], position: int, refused: frozenset[int] = RESERVED_IDS) -> None:
    if refused.isdisjoint(ids):
        return
    index, token = next((i, token) for i, token in enumerate(ids) if token in refused)
    raise bad_request(
        f"the prompt has token {token} ({_NAMES[token]}) at position {position + index}, which is "
        "reserved for images and not text: send pictures as image parts of a user message, and "
        "text that quotes this name as a chat message"
    )
