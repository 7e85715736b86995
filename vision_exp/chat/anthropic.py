"""Refuse images of Anthropic messages that vLLM's conversion would drop, or turn into text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vision_exp.chat.rules import RuleError

_SOURCES = {"base64": "data", "url": "url"}
#: How the APIs of clients name an image's part.
_IMAGES = ("image", "image_url", "input_image")


def check_images(request: Any) -> None:
    """Check the image blocks of a request of the Messages API: who sends them, and from where.

    `request`: vLLM's AnthropicMessagesRequest or AnthropicCountTokensRequest. Raises RuleError
    naming the block.
    """
    system = request.system
    for index, block in enumerate(system if isinstance(system, list) else ()):
        if block.type == "image":
            _check(f"system[{index}]", "system", block.source)
    for index, message in enumerate(request.messages):
        for position, block in enumerate(message.content if message.content else ()):
            if isinstance(block, str):
                break  # the content is text
            where = f"messages[{index}].content[{position}]"
            if block.type == "image":
                _check(where, message.role, block.source)
            if block.type == "tool_result" and isinstance(block.content, list):
                for inner, item in enumerate(block.content):
                    if isinstance(item, Mapping) and item.get("type") == "image":
                        _check(f"{where}.content[{inner}]", message.role, item.get("source"))
                    elif _holds_image(item):
                        raise RuleError(
                            f"{where}.content[{inner}]: an image within this block would not be "
                            "shown to the model. Send it as an image block of the result."
                        )


def _holds_image(value: Any) -> bool:
    """Whether a block that vLLM leaves out, such as a document, holds an image at any depth."""
    if isinstance(value, Mapping):
        texts = (str(value.get(key)).lower() for key in ("media_type", "url"))
        return (
            value.get("type") in _IMAGES
            or any(text.startswith(("image/", "data:image/")) for text in texts)
            or any(map(_holds_image, value.values()))
        )
    return isinstance(value, list) and any(map(_holds_image, value))


def _check(where: str, role: str, source: Any) -> None:
    if role != "user":
        raise RuleError(
            f"{where}: {role} blocks cannot hold an image, only user messages and their tool "
            "results can. Move it into a user message."
        )
    if not isinstance(source, Mapping) or not source:
        raise RuleError(f"{where}: the image block has no source. Send base64 data or a URL.")
    kind = source.get("type", "base64")
    if not isinstance(kind, str) or kind not in _SOURCES:
        raise RuleError(
            f"{where}: images with a source of type {kind!r:.40} are not supported. This server "
            "keeps no files: send base64 data or a URL."
        )
    if not source.get(_SOURCES[kind]):
        raise RuleError(f"{where}: the image block's source has no {_SOURCES[kind]!r}")
