"""Conversations for the message checks: what looks like an image and is none, in every field."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from typing import Any

from rig_chat import SENTINEL, text

from vision_exp.layout import PLACEHOLDER

FORMS = {
    "bare tag": "look at <image> here",
    "paired tag": "<image>a.png</image>",
    "literal": f"say {PLACEHOLDER} twice {PLACEHOLDER}",
    "sentinel": f"{SENTINEL}<|place_holder_mm_span_0435|>",
}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
ASK = {"role": "user", "content": "go"}


def conversation(field: str, words: str) -> tuple[list[Any], dict[str, Any]]:
    """A conversation that has the words in one of its text fields, and template arguments."""
    call = json.loads(json.dumps(CALL))
    answer: dict[str, Any] = {"role": "assistant", "content": "ok"}
    result: dict[str, Any] = {"role": "tool", "tool_call_id": "c1", "content": "done"}
    tool = json.loads(json.dumps(TOOL))
    messages: list[Any] = [{"role": "system", "content": "be kind"}, dict(ASK)]
    if field == "system":
        messages[0]["content"] = words
    elif field == "user":
        messages[1]["content"] = words
    elif field == "assistant":
        messages += [{**answer, "content": words}]
    elif field == "reasoning":
        messages += [{**answer, "reasoning": words, "tool_calls": [call]}, result]
    elif field == "tool call":
        # json.dumps escapes the bars of the placeholder, as most clients do
        call["function"]["arguments"] = json.dumps({"a": words, words: [1]})
        messages += [{**answer, "tool_calls": [call]}, result]
    elif field == "tool result":
        messages += [{**answer, "tool_calls": [call]}, {**result, "content": [text(words)]}]
    elif field == "tool description":
        tool["function"]["description"] = words
    template = {"thinking": True, "tools": [tool]}
    return messages, template


FIELDS = (
    "system",
    "user",
    "assistant",
    "reasoning",
    "tool call",
    "tool result",
    "tool description",
)


@contextmanager
def setting(variable: str, value: str) -> Any:
    os.environ[variable] = value
    try:
        yield
    finally:
        del os.environ[variable]
