"""One chat on its way through the renderer, without vLLM."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from vision_exp import settings
from vision_exp.chat.images import Unreadable
from vision_exp.chat.request import ChatRequest, read_policy
from vision_exp.chat.rules import UNREADABLE_NOTE, Policy, RuleError
from vision_exp.layout import PLACEHOLDER, PLACEHOLDER_ID

IMAGE = object()
PART = {"type": "image_pil", "image_pil": IMAGE, "uuid": "one"}


@dataclass(frozen=True)
class Params:
    """Stands for vLLM's ChatParams."""

    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    media_io_kwargs: dict[str, Any] | None = None


class Renderer:
    """Stands for vLLM's renderer: a token is the code point of a character."""

    model_config = SimpleNamespace(
        multimodal_config=SimpleNamespace(get_limit_per_prompt=lambda _: 2)
    )

    def get_tokenizer(self) -> Any:
        return self

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return list(map(ord, text))


def request(*content: Any, **template: Any) -> ChatRequest:
    messages = [{"role": "user", "content": list(content)}]
    return ChatRequest(Renderer(), messages, Params(template))


def test_an_image_becomes_one_placeholder_where_its_part_stood():
    chat = request("a", PART, "b")
    (message,) = chat.messages
    conversation, prompt = chat.finish([message], {"prompt": message["content"]}, [IMAGE])
    assert prompt["prompt"] == conversation[0]["content"] == f"a\n\n{PLACEHOLDER}\n\nb"
    assert prompt["prompt_token_ids"] == [*map(ord, "a\n\n"), PLACEHOLDER_ID, *map(ord, "\n\nb")]
    assert prompt["multi_modal_data"] == {"image": [IMAGE]}
    assert prompt["multi_modal_uuids"] == {"image": ["one"]}


def test_images_are_given_in_the_order_in_which_the_template_placed_them():
    other = object()
    chat = request(PART, {"type": "image_pil", "image_pil": other})
    marks = chat.messages[0]["content"].split("\n\n")
    _, prompt = chat.finish([], {"prompt": "".join(reversed(marks))}, [IMAGE, other])
    assert prompt["multi_modal_data"] == {"image": [other, IMAGE]}
    assert prompt["multi_modal_uuids"] == {"image": [None, "one"]}


def test_a_quoted_name_is_escaped_for_the_template_and_stays_text():
    chat = request(f"say {PLACEHOLDER}", tools=[PLACEHOLDER])
    assert PLACEHOLDER not in repr((chat.messages, chat.params))
    assert chat.params.chat_template_kwargs["tokenize"] is False
    _, prompt = chat.finish([], {"prompt": chat.messages[0]["content"]}, [])
    assert prompt["prompt_token_ids"] == list(map(ord, f"say {PLACEHOLDER}"))
    assert "multi_modal_data" not in prompt


def test_a_plain_text_is_left_to_vllm():
    chat, prompt = request("a <image>"), {"prompt": "a <image>"}
    assert chat.connector() is None
    assert chat.finish([], prompt, []) == ([], prompt)
    assert chat.finish([], prompt, [])[1] is prompt


def test_names_behind_json_escapes_are_found():
    arguments = json.dumps({"a": PLACEHOLDER})
    assert PLACEHOLDER not in arguments
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    (message,) = ChatRequest(Renderer(), messages, Params()).messages
    found = message["tool_calls"][0]["function"]["arguments"]
    assert list(found) == ["a"]
    assert "\\u" not in repr(found)
    assert PLACEHOLDER not in repr(found)


@pytest.mark.parametrize("arguments", ["{", '["\\u0041"]', '"\\u"', None, {"a": "b"}, '{"a": 1}'])
def test_other_arguments_stay_as_they_are(arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call, "odd", {}]}]
    (message,) = ChatRequest(Renderer(), messages, Params()).messages
    assert message["tool_calls"] == [call, "odd", {}]


def test_an_image_that_the_template_drops_or_repeats_is_an_error():
    chat = request(PART)
    text = chat.messages[0]["content"]
    for lost in ("", text * 2):
        with pytest.raises(RuntimeError, match="the chat template placed images"):
            chat.finish([], {"prompt": lost}, [IMAGE])
    with pytest.raises(RuntimeError, match="the chat template gave no text"):
        chat.needs_ids({"prompt_token_ids": [1]})


def test_the_limit_is_that_of_the_server():
    with pytest.raises(RuleError, match="limit is 2"):
        request(PART, PART, PART)


def test_an_image_that_is_left_out_leaves_a_note(monkeypatch):
    monkeypatch.setenv(settings.UNREADABLE_IMAGES.name, "note")
    other = object()
    chat = request("a", PART, {"type": "image_pil", "image_pil": other})
    loaded = [Unreadable("gone"), other]
    chat.leave_out(loaded)
    (message,) = chat.messages
    _, prompt = chat.finish([], {"prompt": message["content"]}, loaded)
    assert prompt["prompt"] == f"a\n\n{UNREADABLE_NOTE}\n\n{PLACEHOLDER}"
    assert prompt["multi_modal_data"] == {"image": [other]}
    assert prompt["multi_modal_uuids"] == {"image": [None]}


@pytest.mark.parametrize(
    "variable",
    [settings.TOOL_IMAGES.name, settings.IMAGE_OVERFLOW.name, settings.UNREADABLE_IMAGES.name],
)
def test_a_wrong_setting_is_named(variable, monkeypatch):
    monkeypatch.setenv(variable, "keep")
    with pytest.raises(ValueError, match=variable):
        read_policy()


def test_settings(monkeypatch):
    assert read_policy(3) == Policy("refuse", "refuse", 3)
    monkeypatch.setenv(settings.TOOL_IMAGES.name, "move")
    monkeypatch.setenv(settings.IMAGE_OVERFLOW.name, "keep-newest")
    monkeypatch.setenv(settings.UNREADABLE_IMAGES.name, "note")
    assert read_policy() == Policy("move", "keep-newest", None, "note")
