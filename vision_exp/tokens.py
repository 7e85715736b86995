"""Names of the special tokens behind the ids that layout.py uses."""

from __future__ import annotations

from typing import Any

from vision_exp.layout import PLACEHOLDER_ID, SENTINEL_FIRST, TokenType
from vision_exp.registry import VisionConfigError

#: What stands for one image in a prompt's text.
PLACEHOLDER = "<｜deepseek_image｜>"

#: The placeholder and the five reserved tokens that image blocks borrow, with their ids.
TOKENS = {PLACEHOLDER: PLACEHOLDER_ID} | {
    f"<|place_holder_mm_span_{431 + kind:04}|>": SENTINEL_FIRST + kind for kind in TokenType
}


def check_tokenizer(tokenizer: Any) -> None:
    """Check that the special tokens have the ids that the layout assumes.

    `tokenizer` may be None (skip_tokenizer_init). Raises VisionConfigError naming the token.
    """
    if tokenizer is None:
        return
    for name, expected in TOKENS.items():
        found = tokenizer.convert_tokens_to_ids(name)
        if found != expected:
            raise VisionConfigError(f"the tokenizer maps {name!r} to {found}, not to {expected}")
