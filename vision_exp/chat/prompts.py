"""Refuses prompts that hold the ids of image tokens where the processor did not put them.

Routing, embedding and visibility take the five sentinel ids for image rows, so no client may
place them: not as raw token ids, not by typing the names of the tokens into a completion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from vision_exp.chat.blocks import check_feature
from vision_exp.chat.placement import place as place_blocks
from vision_exp.chat.rules import has_images
from vision_exp.config import VisionConfig, is_vision_exp
from vision_exp.layout import (
    END_ID,
    IMAGE_ID,
    PLACEHOLDER,
    PLACEHOLDER_ID,
    RESERVED_IDS,
    TOKENS,
    leading_pads,
)

_NAMES = {token_id: name for name, token_id in TOKENS.items()}


def check_rendered(prompt: Any) -> None:
    """Check that every image of an engine input has one place, one hash and one item of data.

    Another server's may hold anything, and vLLM would end with an IndexError. Raises what maps to
    HTTP 400.
    """
    if prompt.get("type") != "multimodal":
        return
    places, hashes, data = (
        {kind: len(items) for kind, items in prompt[key].items() if items}
        for key in ("mm_placeholders", "mm_hashes", "mm_kwargs")
    )
    if not places == hashes == data:
        raise bad_request(
            f"the rendered prompt has places of {places}, hashes of {hashes} and data of {data}: "
            "each image needs one of each. Send what the render endpoint gave, unchanged"
        )


def check_processed(request: Any, hf_config: Any) -> None:
    """Check what InputProcessor.process_inputs made, and give its images their `is_embed`.

    `request`: vLLM's EngineCoreRequest. Does nothing for text-only checkpoints. Raises what maps to
    HTTP 400.
    """
    if not is_vision_exp(hf_config):
        return
    restore_is_embed(request)
    check_request(request, hf_config)
    # Tokens that a replayed request pretends to have generated.
    _refuse(getattr(request.sampling_params, "trace_decode_token_ids", None) or (), 0)


def take_ids(request: Any, messages: Iterable[Any]) -> list[int] | None:
    """Token ids in a chat's `kv_transfer_params` that stand for a prompt with images.

    They are removed there. A prefill server made them, and vLLM would give them to the engine
    alone, without the images. None if images are not concerned.
    """
    params = getattr(request, "kv_transfer_params", None)
    if not isinstance(params, dict):
        return None
    ids = params.get("prompt_token_ids")
    if not ids or (RESERVED_IDS.isdisjoint(ids) and not has_images(messages)):
        return None
    return list(params.pop("prompt_token_ids"))


def replay(engine_input: Any, ids: list[int]) -> Any:
    """A chat's engine input with a prefill server's ids, its images where they have their blocks.

    Raises what maps to HTTP 400 if these are not the blocks of these images.
    """
    from vllm.multimodal.inputs import PlaceholderRange

    places = (engine_input.get("mm_placeholders") or {}).get("image", [])
    rendered = engine_input["prompt_token_ids"]
    blocks = [
        rendered[place.offset + leading_pads(place.offset) : place.offset + place.length]
        for place in sorted(places, key=lambda place: place.offset)
    ]
    try:
        made, placed = place_blocks(ids, blocks)
    except ValueError as error:
        raise bad_request(f"kv_transfer_params.prompt_token_ids: {error}") from error
    if made != ids:
        raise bad_request("kv_transfer_params.prompt_token_ids: an image's block is not expanded")
    ranges = [
        PlaceholderRange(one.start, len(one.tokens), torch.tensor(one.tokens) == IMAGE_ID)
        for one in placed
    ]
    return {
        **engine_input,
        "prompt_token_ids": ids,
        **({"mm_placeholders": {"image": ranges}} if ranges else {}),
    }


def restore_is_embed(request: Any) -> None:
    """Give images whose `is_embed` got lost between servers theirs again.

    vLLM sends a rendered prompt's placeholders without it, which would then count START, pads,
    newlines and END among the tower's rows. The ids say which are.
    """
    for feature in request.mm_features or ():
        place = feature.mm_position
        if feature.modality == "image" and place.is_embed is None:
            ids = request.prompt_token_ids[place.offset : place.offset + place.length]
            is_embed = torch.tensor(ids) == IMAGE_ID
            feature.mm_position = dataclasses.replace(place, is_embed=is_embed)


def check_prompt(prompt: Any) -> None:
    """Check a prompt that is about to be processed. Raises what maps to HTTP 400.

    Reserved ids may stand only beside images; the processor compares them with these.
    """
    ids = prompt.get("prompt_token_ids") or ()
    data = prompt.get("multi_modal_data")
    if not data:
        _refuse(ids, 0)
        return
    images = data.get("image")
    count = len(images) if isinstance(images, list) else 1
    left = ids.count(PLACEHOLDER_ID) + ids.count(END_ID)
    # The text is from before truncation. A prompt of ids alone says nothing of what was cut.
    if left < count <= (prompt.get("prompt") or "").count(PLACEHOLDER):
        raise bad_request(
            f"truncate_prompt_tokens cuts {count - left} of the request's {count} images out of "
            "the prompt. Raise it, leave it out, or send fewer images"
        )


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


def _refuse(ids: Sequence[int], position: int) -> None:
    if RESERVED_IDS.isdisjoint(ids):
        return
    index, token = next((i, token) for i, token in enumerate(ids) if token in RESERVED_IDS)
    raise bad_request(
        f"the prompt has token {token} ({_NAMES[token]}) at position {position + index}, which is "
        "reserved for images and not text: send images as image parts of a user message, and "
        "text that quotes this name as a chat message. (Ids that this server made of a chat with "
        "images are taken back together with the same images only, not by /v1/completions.)"
    )


def bad_request(message: str) -> Exception:
    """The exception that this vLLM answers with HTTP 400. Not a ValueError on every release."""
    from vllm.exceptions import VLLMValidationError

    return VLLMValidationError(message)
