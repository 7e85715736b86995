"""Checks over many conversations: those from the field, and random ones."""

from __future__ import annotations

import json
import random
from typing import Any

import rig_chat as rig
import vllm
from conversations import ASK, CALL, FORMS, TOOL, setting
from rig_chat import SENTINEL, Server, pil, refused, text

from vision_exp import settings
from vision_exp.layout import PLACEHOLDER, TOKENS


def check_field_reports(server: Server) -> None:
    """Conversations that broke other implementations."""
    grep = f"vision_exp/x.py:3: PLACEHOLDER = '{PLACEHOLDER}'\nREADME.md:9: <image>{SENTINEL}"
    poisoned = [
        {"role": "user", "content": "How do I send an image?"},
        {
            "role": "assistant",
            "content": f"Write <image> or {PLACEHOLDER}.",
            "reasoning": "<image>",
        },
        {"role": "user", "content": "ping"},
    ]
    agent = [
        {"role": "user", "content": [text("Describe"), pil(0)]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": grep},
        {"role": "assistant", "content": f"It says {PLACEHOLDER}", "reasoning": f"see {SENTINEL}"},
        {"role": "user", "content": [pil(1), text(f"and {PLACEHOLDER}?"), pil(2)]},
    ]
    for messages, count in ((poisoned, 0), (agent, 3)):
        for template in ({"thinking": True, "tools": [TOOL]}, {"thinking": False}):
            prompt = server.prompt(messages, **template)
            ids = server.ids(prompt)
            rig.no_reserved(ids, count)
            expected = server.expected_text(messages, PLACEHOLDER, **template)
            assert server.tokenizer.decode(ids) == expected
            images = prompt.get("multi_modal_data", {}).get("image", [])
            assert images == rig.images_in(messages)
    bad = [*agent[:2], {**agent[2], "content": [text("shot"), pil(4)]}]
    for tail in ([], [ASK, {"role": "assistant", "content": "ok"}, {**ASK, "content": "ping"}]):
        refused(lambda t=tail: server.prompt([*bad, *t]), "messages[2].content[1]")
        for mode in ("move", "note"):
            with setting(settings.TOOL_IMAGES.name, mode):
                images = server.prompt([*bad, *tail])["multi_modal_data"]["image"]
                assert len(images) == (2 if mode == "move" else 1)


def check_200_conversations_against_the_text_encoder(server: Server) -> None:
    """Ids with images equal those of the text encoder, id by id; through the processor too."""
    chooser = random.Random(8)
    for number in range(200):
        messages, template = random_conversation(chooser)
        prompt = server.prompt(messages, **template)
        assert server.ids(prompt) == server.expected_ids(messages, **template), messages
        images = prompt.get("multi_modal_data", {}).get("image", [])
        assert images == rig.images_in(messages)
        if number % 8 == 0:
            assert rig.collapsed(server.chat(messages, **template)) == server.ids(prompt)


WORDS = [
    "a",
    " the",
    "\n",
    "\n\n",
    "image",
    " 12345",
    "日本",
    "<image>",
    "<｜deep",
    "  ",
    "é",
    "<|",
]


def random_conversation(chooser: random.Random) -> tuple[list[Any], dict[str, Any]]:
    def words() -> str:
        return "".join(chooser.choices(WORDS, k=chooser.randrange(6)))

    left = rig.LIMIT
    messages: list[Any] = []
    if chooser.random() < 0.5:
        messages.append({"role": "system", "content": words()})
    for _ in range(chooser.randrange(1, 4)):
        parts: list[Any] = []
        for _ in range(chooser.randrange(5)):
            if left and chooser.random() < 0.5:
                left -= 1
                parts.append(pil(chooser.randrange(20)))
            else:
                parts.append(text(words()))
        messages.append({"role": "user", "content": parts or words()})
        answer: dict[str, Any] = {"role": "assistant", "content": words()}
        if chooser.random() < 0.4:
            answer["reasoning"] = words()
        if chooser.random() < 0.4:
            arguments = json.dumps({words(): words()})
            function = {"name": "f", "arguments": arguments}
            answer["tool_calls"] = [{**CALL, "function": function}]
            result = {"role": "tool", "tool_call_id": "c1", "content": [text(words())]}
            messages += [answer, result]
        else:
            messages.append(answer)
    if chooser.random() < 0.7 and messages[-1]["role"] == "assistant":
        messages.pop()
    template: dict[str, Any] = {"thinking": chooser.random() < 0.5}
    if chooser.random() < 0.3:
        template["tools"] = [TOOL]
    return messages, template


def any_prose(chooser: random.Random) -> str:
    """Reserved tokens, what looks like an image, and plain words, in any mixture."""
    return "".join(chooser.choices(PROSE, k=chooser.randrange(5)))


PROSE = [*TOKENS, *FORMS.values(), *WORDS]


def any_message(chooser: random.Random) -> dict[str, Any]:
    """A message of any role that need not follow from the one before it."""
    words, more = any_prose(chooser), any_prose(chooser)
    call = {**CALL, "function": {"name": "f", "arguments": json.dumps({more: more})}}
    parts = [text(any_prose(chooser)) for _ in range(chooser.randrange(5))]
    mixed = [pil(chooser.randrange(10)) if chooser.random() < 0.5 else part for part in parts]
    return chooser.choice(
        [
            {"role": "user", "content": words},
            {"role": "user", "content": mixed},
            {"role": "system", "content": words},
            {"role": "assistant", "content": words, "reasoning": more},
            {"role": "assistant", "content": words, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": words},
            {"role": "tool", "tool_call_id": "c1", "content": parts[:2]},
        ]
    )


def check_1000_conversations(server: Server) -> None:
    """Placeholders are the structured parts in order, and the text survives.

    Others in each release. Not by hypothesis, which took twice as long to draw one as this to
    check it.
    """
    refusals = 0
    for number in range(1000):
        chooser = random.Random(f"{vllm.__version__} {number}")
        messages = [any_message(chooser) for _ in range(chooser.randrange(1, 6))]
        thinking = chooser.random() < 0.5
        try:
            refusals += not placed(server, messages, thinking)
        except Exception as error:
            raise AssertionError(f"conversation {number}: {messages}") from error
    assert 0 < refusals < 500


def placed(server: Server, messages: list[Any], thinking: bool) -> bool:
    """Checks one conversation; False where it has more images than are allowed."""
    images = rig.images_in(messages)
    if len(images) > rig.LIMIT:
        refused(lambda: server.prompt(messages), "--limit-mm-per-prompt")
        return False
    prompt = server.prompt(messages, thinking=thinking)
    ids = server.ids(prompt)
    rig.no_reserved(ids, len(images))
    found = prompt.get("multi_modal_data", {}).get("image", [])
    assert len(found) == len(images)
    assert all(a is b for a, b in zip(found, images, strict=True))
    expected = server.expected_text(messages, PLACEHOLDER, thinking=thinking)
    assert server.tokenizer.decode(ids) == expected
    return True
