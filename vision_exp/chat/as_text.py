"""Say in the log that a client sends images as text, which the model reads as text."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

logger = logging.getLogger("vllm.vision_exp")

# How the base64 of PNG, JPEG (plain, url-safe, with escaped slashes), GIF, WebP, TIFF, AVIF and
# HEIC begins; a data URL may hold others. Plain searches: all text of all chats passes here.
_BEGINNINGS = (
    "data:image", "DATA:IMAGE", "iVBORw0KGgo", "/9j/", "_9j_", r"\/9j\/", "R0lGOD", "UklGR",
    "SUkqA", "TU0AK", "GZ0eXB",
)  # fmt: skip
_LEAST = 256
_HEAD = r"(?:data:image\\?/[\w.+-]{1,40}(?:;[\w.=+-]{1,40}){0,4};base64,\s*)?"
_BREAK = r"(?:[ \t]*(?:\r?\n|\\r|\\n|\"\s*,\s*\")[ \t]*)*"
_BODY = rf"(?:(?:[A-Za-z0-9+/_=-]|\\/|\\u002[fb]|%2[fb]){_BREAK}){{{_LEAST}}}"
_IMAGE = re.compile(_HEAD + _BODY, re.IGNORECASE)


def is_image(text: str) -> bool:
    """Whether the text holds the base64 of an image, at least 256 characters of it.

    With or without `data:`, in lines, also as a list of them, or in one, as JSON strings or URLs
    have it, standard or url-safe.
    """
    for beginning in _BEGINNINGS:
        at = text.find(beginning)
        while at >= 0:
            if _IMAGE.match(text, at):
                return True
            at = text.find(beginning, at + 1)
    return False


def warn(messages: Sequence[Any], warned: set[str]) -> None:
    """Log where messages hold an image as text, once for each kind of place.

    `warned`: the kinds that were said already, such as "content of user messages"; added to.
    """
    for message in messages:
        for kind, value in _places(message):
            if kind not in warned and any(map(is_image, _strings(value))):
                warned.add(kind)
                logger.warning(
                    "[vision-exp] the %s holds the base64 of an image as text: the model reads it "
                    "as text, not as an image. Send it as an image_url part. (Said once of this "
                    "kind.)",
                    kind,
                )


def _places(message: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(message, Mapping):
        return
    yield f"content of {message.get('role')} messages", message.get("content")
    yield "reasoning of assistant messages", message.get("reasoning")
    yield "reasoning of assistant messages", message.get("reasoning_content")
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
            yield "arguments of tool calls", call["function"].get("arguments")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
