"""Marks that stand for images and for reserved names while a prompt is a string.

The names of the placeholder and of the five sentinels become control tokens when a prompt that
holds them is tokenised. Where they occur in a request's text they are prose: marks stand for them
while the chat template runs (an encoder may refuse them), and they are encoded in two halves, so
that the text survives and no control token appears. Marks hold a random key per request, so that
no text can imitate them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterator
from typing import Any

from vision_exp.layout import PLACEHOLDER, PLACEHOLDER_ID, RESERVED_IDS, TOKENS

_NAMES = tuple(TOKENS)
_NAME = re.compile("|".join(map(re.escape, _NAMES)))

Encode = Callable[[str], "list[int]"]


class ReservedTokenEscaper:
    """The marks of one request."""

    def __init__(self) -> None:
        self._key = secrets.token_hex(16)
        self._mark = re.compile(rf"{self._key}([in])(\d+)e")

    def image(self, index: int) -> str:
        """The mark of the request's image number `index`."""
        return f"{self._key}i{index}e"

    def note(self, value: Any, images: Collection[int], note: str) -> Any:
        """Nested dicts, lists and strings with a note for the marks of some images. A copy."""

        def text(match: re.Match[str]) -> str:
            return note if match[1] == "i" and int(match[2]) in images else match[0]

        return _map(value, lambda words: self._mark.sub(text, words))

    def escape(self, value: Any) -> Any:
        """Nested dicts, lists and strings with marks for the reserved names.

        A copy; what holds no reserved name is the object itself.
        """
        return _map(value, lambda text: _NAME.sub(self._escaped, text))

    def _escaped(self, match: re.Match[str]) -> str:
        return f"{self._key}n{_NAMES.index(match[0])}e"

    def unescape(self, value: Any) -> Any:
        """A copy in which marks have become the names they stand for, images the placeholder."""
        return _map(value, lambda text: self._mark.sub(self._unescaped, text))

    def _unescaped(self, match: re.Match[str]) -> str:
        return PLACEHOLDER if match[1] == "i" else _NAMES[int(match[2])]

    def split(self, prompt: str) -> Iterator[str | int]:
        """The rendered prompt as pieces: text to encode on its own, or the number of an image."""
        text = ""
        position = 0
        for match in self._mark.finditer(prompt):
            text += prompt[position : match.start()]
            position = match.end()
            if match[1] == "n":
                text += _NAMES[int(match[2])]
                continue
            yield from split_reserved(text)
            yield int(match[2])
            text = ""
        yield from split_reserved(text + prompt[position:])


def has_reserved_name(text: str) -> bool:
    """True if tokenising the text would give a reserved id."""
    return _NAME.search(text) is not None


def encode(pieces: Iterator[str | int], encode_text: Encode) -> tuple[list[int], list[int]]:
    """(token ids, numbers of the images in prompt order); each image is one placeholder id.

    `encode_text` must add no special tokens. Raises RuntimeError if text gave a reserved id.
    """
    ids: list[int] = []
    images: list[int] = []
    for piece in pieces:
        if isinstance(piece, int):
            ids.append(PLACEHOLDER_ID)
            images.append(piece)
            continue
        encoded = encode_text(piece)
        if not RESERVED_IDS.isdisjoint(encoded):
            raise RuntimeError("the tokenizer made text into a token reserved for images")
        ids += encoded
    return ids, images


def split_reserved(text: str) -> Iterator[str]:
    """Pieces of the text, cut inside every reserved name. Names cannot overlap."""
    position = 0
    for match in _NAME.finditer(text):
        middle = (match.start() + match.end()) // 2
        yield text[position:middle]
        position = middle
    if position < len(text):
        yield text[position:]


def _map(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with every string changed; a container in which nothing changed stays itself."""
    changed: Any
    if isinstance(value, str):
        changed = change(value)
    elif isinstance(value, dict):
        changed = {_map(key, change): _map(item, change) for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        parts = [_map(item, change) for item in value]
        changed = parts if isinstance(value, list) else tuple(parts)
    else:
        return value
    return value if changed == value else changed  # items that did not change are the same objects
