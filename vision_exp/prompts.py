"""Refuses prompts that hold the ids of image tokens where the processor did not put them.

Routing, embedding and visibility take the five sentinel ids for image rows, so no client may
place them: not as raw token ids, not by typing the names of the tokens into a completion. Acts
for vision checkpoints only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from vision_exp import lazy
from vision_exp.config import is_vision_exp
from vision_exp.layout import PLACEHOLDER_ID, SENTINEL_FIRST, SENTINEL_LAST, TokenType, leading_pads
from vision_exp.messages import bad_request
from vision_exp.messages_text import RESERVED_IDS, RESERVED_NAMES

_NAMES = {token_id: name for name, token_id in RESERVED_NAMES.items()}
_SENTINELS = RESERVED_IDS - {PLACEHOLDER_ID}
_START = SENTINEL_FIRST + TokenType.START
_PAD = SENTINEL_FIRST + TokenType.PAD
_IMAGE = SENTINEL_FIRST + TokenType.IMAGE
_END = SENTINEL_FIRST + TokenType.END


def install() -> None:
    """Wrap the two places that every prompt passes, once they are imported.

    The renderer, before anything is processed: an error there is an HTTP status even for streams.
    The engine's input processor: what it lets through has image ids in placeholders alone, also
    when another server rendered the request.
    """
    lazy.when_imported("vllm.renderers.base", _wrap_renderer)
    lazy.when_imported("vllm.v1.engine.input_processor", _wrap_input_processor)


def _wrap_renderer(module: ModuleType) -> None:
    lazy.wrap(module.BaseRenderer, "process_for_engine", _process_for_engine)
    lazy.wrap(module.BaseRenderer, "process_for_engine_async", _process_for_engine_async)


def _wrap_input_processor(module: ModuleType) -> None:
    lazy.wrap(module.InputProcessor, "process_inputs", _process_inputs)


def _is_vision(owner: Any) -> bool:
    return is_vision_exp(getattr(owner.model_config, "hf_config", None))


def _process_for_engine(original: Any, self: Any, prompt: Any, *args: Any, **kwargs: Any) -> Any:
    if _is_vision(self):
        check_prompt(prompt)
    return original(self, prompt, *args, **kwargs)


async def _process_for_engine_async(
    original: Any, self: Any, prompt: Any, *args: Any, **kwargs: Any
) -> Any:
    if _is_vision(self):
        check_prompt(prompt)
    return await original(self, prompt, *args, **kwargs)


def _process_inputs(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    request = original(self, *args, **kwargs)
    if _is_vision(self):
        spans = [
            (feature.mm_position.offset, feature.mm_position.length)
            for feature in request.mm_features or ()
        ]
        check_ids(request.prompt_token_ids or (), spans)
        trace = getattr(request.sampling_params, "trace_decode_token_ids", None)
        check_ids(trace or (), ())
    return request


def check_prompt(prompt: Any) -> None:
    """Check a prompt that is about to be processed. Raises what maps to HTTP 400.

    Placeholders may stand only beside images; the processor compares their number.
    """
    ids = prompt.get("prompt_token_ids") or ()
    refused = _SENTINELS if prompt.get("multi_modal_data") else RESERVED_IDS
    _refuse(ids, 0, refused)


def check_ids(ids: Sequence[int], spans: Iterable[tuple[int, int]]) -> None:
    """Check processed token ids with image blocks at (offset, length). Raises what maps to 400.

    Outside the blocks there may be no reserved id; a block must be one that the layout gives.
    """
    done = 0
    for offset, length in sorted(spans):
        if offset < done or not _is_block(ids[offset : offset + length], offset):
            raise bad_request(f"the tokens at position {offset} are not the block of an image")
        _refuse(ids[done:offset], done, RESERVED_IDS)
        done = offset + length
    _refuse(ids[done:] if done else ids, done, RESERVED_IDS)


def _is_block(block: Sequence[int], offset: int) -> bool:
    """Pads up to the alignment, START, a grid of image tokens, END."""
    pads = leading_pads(offset)
    inner = block[pads + 1 : -1]
    return (
        all(token == _PAD for token in block[:pads])
        and len(block) > pads + 2
        and block[pads] == _START
        and block[-1] == _END
        and _IMAGE in inner
        and all(SENTINEL_FIRST < token < SENTINEL_LAST for token in inner)
    )


def _refuse(ids: Sequence[int], position: int, refused: frozenset[int]) -> None:
    if refused.isdisjoint(ids):
        return
    index, token = next((i, token) for i, token in enumerate(ids) if token in refused)
    raise bad_request(
        f"the prompt has token {token} ({_NAMES[token]}) at position {position + index}, which is "
        "reserved for images and not text: send pictures as image parts of a user message, and "
        "text that quotes this name as a chat message"
    )
