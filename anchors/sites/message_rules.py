"""The chat encoding: judged only, because the renderer is wrapped and hands it plain strings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anchors.kit.anchor import (
    ABSENT,
    NOT_APPLICABLE,
    TWICE,
    Anchor,
    Case,
    Match,
    NotApplicable,
    exactly_one,
    functions,
)

if TYPE_CHECKING:
    import libcst as cst

_ENTRY = "encode_messages"
_SIGNS = ("image", "vision_start", "place_holder_mm_span")


def _find(module: cst.Module) -> Match:
    text = module.code.lower()
    if not any(sign in text for sign in _SIGNS):
        raise NotApplicable("no image handling in this file: the renderer is wrapped instead")
    exactly_one(f"top-level function {_ENTRY}", len(functions(module, _ENTRY)))
    raise NotApplicable(
        "a checkpoint's own encoding with image rules: it is handed plain strings only, in which "
        "no image is left to reject"
    )


_STOCK = "def encode_messages(messages, **options):\n    return ''\n"
_OWN = 'IMAGE = "<image>"\n\n\n' + _STOCK

ANCHORS = (
    Anchor(
        id="message-rules",
        file="tokenizers/deepseek_v4_encoding.py",
        where="whole file",
        what="no edit: judges whether the file has image rules of its own",
        why=(
            "Some start scripts copy the checkpoint's encoding over vLLM's. The overlay settles "
            "images before it calls encode_messages, which must therefore be there."
        ),
        until="vLLM 0.30.0",
        upstream="vllm-project/vllm pull request 54566",
        find=_find,
        render=None,
        cases=(
            Case(NOT_APPLICABLE, _STOCK),
            Case(NOT_APPLICABLE, _OWN),
            Case(ABSENT, _OWN.replace("encode_messages", "encode")),
            Case(TWICE, _OWN + _STOCK),
        ),
        order=50,
    ),
)
