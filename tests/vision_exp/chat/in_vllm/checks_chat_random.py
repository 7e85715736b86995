"""Checks over many conversations: those from the field, and random ones."""

from __future__ import annotations

import json
import random
from typing import Any

import rig_chat as rig
from conversations import ASK, CALL, FORMS, TOOL, setting
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
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


prose = st.lists(st.sampled_from([*TOKENS, *FORMS.values(), *WORDS]), max_size=4).map("".join)
user_parts = st.lists(st.one_of(prose.map(text), st.integers(0, 9).map(pil)), max_size=4)
any_message = st.one_of(
    st.builds(lambda c: {"role": "user", "content": c}, st.one_of(prose, user_parts)),
    st.builds(lambda c: {"role": "system", "content": c}, prose),
    st.builds(lambda c, r: {"role": "assistant", "content": c, "reasoning": r}, prose, prose),
    st.builds(
        lambda c, a: {
            "role": "assistant",
            "content": c,
            "tool_calls": [{**CALL, "function": {"name": "f", "arguments": json.dumps({a: a})}}],
        },
        prose,
        prose,
    ),
    st.builds(
        lambda c: {"role": "tool", "tool_call_id": "c1", "content": c},
        st.one_of(prose, st.lists(prose.map(text), max_size=2)),
    ),
)


def check_2000_conversations(server: Server) -> None:
    """Placeholders are the structured parts in order, and the text survives."""
    options = {"max_examples": 2000, "derandomize": True, "deadline": None, "database": None}
    health = list(HealthCheck)

    @hypothesis_settings(**options, suppress_health_check=health)
    @given(st.lists(any_message, min_size=1, max_size=5), st.booleans())
    def hold(messages: list[Any], thinking: bool) -> None:
        images = rig.images_in(messages)
        if len(images) > rig.LIMIT:
            refused(lambda: server.prompt(messages), "--limit-mm-per-prompt")
            return
        prompt = server.prompt(messages, thinking=thinking)
        ids = server.ids(prompt)
        rig.no_reserved(ids, len(images))
        found = prompt.get("multi_modal_data", {}).get("image", [])
        assert len(found) == len(images)
        assert all(a is b for a, b in zip(found, images, strict=True))
        expected = server.expected_text(messages, PLACEHOLDER, thinking=thinking)
        assert server.tokenizer.decode(ids) == expected

    hold()
