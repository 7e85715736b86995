"""The rules for image parts, without vLLM."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vision_exp.chat import rules
from vision_exp.chat.rules import Policy, RuleError

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
IMAGE_PARTS = [
    IMAGE,
    {"type": "input_image", "image_url": "https://example.com/a.png"},
    {"type": "image", "image": object()},
    {"type": "image_pil", "image_pil": object()},
    {"image_url": "https://example.com/a.png"},
    {"type": "image_url", "image_url": None, "uuid": "a"},
    {"type": "other", "image_url": "https://example.com/a.png", "uuid": "a"},
    {"type": "text", "text": "x", "image_url": "https://example.com/a.png", "uuid": "a"},
]
PROSE = [
    "<image>",
    "<image>x</image>",
    "<｜deepseek_image｜>",
    "<|place_holder_mm_span_0431|>",
    '{"type": "image_url"}',
    {"type": "text", "text": "<image>"},
    {"type": "input_text", "text": "image_url"},
    {"type": "text", "text": "x", "image_url": "https://example.com/a.png"},
    {"type": "text", "text": "x", "uuid": "a"},
    {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}},
]


def read(messages, **policy):
    return rules.read_chat(messages, Policy(**policy), lambda index: f"@{index}@")


@pytest.mark.parametrize("part", IMAGE_PARTS)
def test_structured_parts_are_images(part):
    assert rules.is_image(part)


@pytest.mark.parametrize("part", PROSE)
def test_everything_else_is_not(part):
    assert not rules.is_image(part)


@pytest.mark.parametrize("item", [{"type": "picture"}, {"role": None}, {"role": ""}, object()])
def test_what_has_no_role_is_named(item):
    user = {"role": "user", "content": "a"}
    with pytest.raises(RuleError, match=r"messages\[1\]: .* of type '(picture|dict|object)'"):
        read([user, item, user])


def test_parts_keep_their_order_and_are_joined_by_two_newlines():
    parts = ["a", IMAGE, {"type": "text", "text": "b\n"}, IMAGE, IMAGE]
    chat = read([{"role": "user", "content": parts}])
    assert chat.messages[0]["content"] == "a\n\n@0@\n\nb\n\n\n@1@\n\n@2@"
    assert [image.where for image in chat.images] == [
        "messages[0].content[1]",
        "messages[0].content[3]",
        "messages[0].content[4]",
    ]


def test_the_request_is_not_changed():
    content = [{"type": "text", "text": "a"}, IMAGE]
    messages = [{"role": "user", "content": content}]
    read(messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}]


def test_an_iterator_as_content_can_still_be_read_afterwards():
    messages = [{"role": "user", "content": iter(["a", IMAGE])}]
    assert read(messages).messages[0]["content"] == "a\n\n@0@"
    assert messages[0]["content"] == ["a", IMAGE] or len(messages[0]["content"]) == 2


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}},
        {"type": ["text"], "text": "a"},
        {"type": {}},
    ],
)
def test_a_part_that_vllm_must_judge_is_left_to_it(part):
    chat = read([{"role": "user", "content": ["a", IMAGE, part]}])
    assert chat.messages[0]["content"] == ["a", "@0@", part]


@pytest.mark.parametrize("content", [None, "", "text <image>"])
def test_messages_without_parts_stay_themselves(content):
    message = {"role": "user", "content": content}
    assert read([message]).messages[0] is message


@pytest.mark.parametrize("role", ["system", "assistant", "developer"])
def test_images_outside_user_messages_are_refused(role):
    messages = [{"role": "user", "content": "x"}, {"role": role, "content": ["a", IMAGE]}]
    with pytest.raises(RuleError) as caught:
        read(messages)
    assert "messages[1].content[1]" in str(caught.value)
    assert repr(role) in str(caught.value)
    assert "user message" in str(caught.value)


def tool(*parts):
    return {"role": "tool", "tool_call_id": "a", "content": list(parts)}


def test_tool_images_are_refused_by_default_and_the_error_names_the_ways_out():
    with pytest.raises(RuleError, match=r"messages\[0\].content\[0\].*move.*note"):
        read([tool(IMAGE)])


def test_tool_images_become_notes():
    chat = read([tool("a", IMAGE)], tool_images="note")
    assert chat.images == []
    assert chat.messages[0]["content"] == f"a\n\n{rules.TOOL_IMAGE_NOTE}"


def test_tool_images_move_to_the_user_message_that_follows():
    other = {"type": "image", "image": 2}
    chat = read(
        [tool(IMAGE, "a"), tool(other), {"role": "user", "content": "b"}], tool_images="move"
    )
    first, second, user = (message["content"] for message in chat.messages)
    assert first == f"{rules.MOVED_NOTE.format(1)}\n\na"
    assert second == rules.MOVED_NOTE.format(2)
    labels = [rules.MOVED_LABEL.format(n) for n in (1, 2)]
    assert user == f"{labels[0]}\n\n@0@\n\n{labels[1]}\n\n@1@\n\nb"
    assert [image.part for image in chat.images] == [IMAGE, other]


@pytest.mark.parametrize("after", [[], [{"role": "assistant", "content": "done"}]])
def test_tool_images_get_a_user_message_of_their_own_where_none_follows(after):
    chat = read([tool(IMAGE), *after], tool_images="move")
    assert chat.messages[1] == {
        "role": "user",
        "content": f"{rules.MOVED_LABEL.format(1)}\n\n@0@",
    }
    assert chat.messages[2:] == after


def test_moving_tool_images_does_not_let_others_in():
    with pytest.raises(RuleError, match="'system'"):
        read([{"role": "system", "content": [IMAGE]}], tool_images="move")


@pytest.mark.parametrize("limit", [0, 1, 8])
def test_the_limit(limit):
    messages = [{"role": "user", "content": [IMAGE]} for _ in range(limit)]
    assert len(read(messages, limit=limit).images) == limit
    messages.append({"role": "user", "content": [IMAGE]})
    with pytest.raises(RuleError) as caught:
        read(messages, limit=limit)
    assert rules.LIMIT_FLAG in str(caught.value)
    assert f"limit is {limit}" in str(caught.value)


def test_keep_newest_replaces_the_oldest():
    parts = [{"type": "image", "image": number} for number in range(5)]
    messages = [{"role": "user", "content": ["a", part]} for part in parts]
    chat = read(messages, limit=2, overflow="keep-newest")
    assert [image.part["image"] for image in chat.images] == [3, 4]
    contents = [message["content"] for message in chat.messages]
    assert contents[:3] == [f"a\n\n{rules.OVERFLOW_NOTE}"] * 3
    assert contents[3:] == ["a\n\n@0@", "a\n\n@1@"]


part = st.one_of(st.sampled_from(PROSE[:5]), st.sampled_from(IMAGE_PARTS), st.text(max_size=3))
message = st.builds(
    lambda role, parts: {"role": role, "content": parts},
    st.sampled_from(["user", "tool", "user"]),
    st.lists(part, max_size=4),
)


@given(st.lists(message, max_size=5), st.sampled_from(["move", "note"]))
def test_marks_are_the_structured_parts_in_order(messages, mode):
    chat = read(messages, tool_images=mode)
    # A tool's result without images stays a list.
    text = "|".join(str(message["content"]) for message in chat.messages)
    places = [text.index(f"@{number}@") for number in range(len(chat.images))]
    assert places == sorted(places)
    expected = [
        part
        for message in messages
        for part in message["content"]
        if rules.is_image(part) and (mode == "move" or message["role"] == "user")
    ]
    assert sorted(map(repr, (image.part for image in chat.images))) == sorted(map(repr, expected))


def test_a_tool_result_of_texts_is_left_to_vllm():
    result = tool({"type": "text", "text": "a"}, {"type": "text", "text": "b"})
    for mode in ("refuse", "note", "move"):
        chat = read([result, {"role": "user", "content": [IMAGE]}], tool_images=mode)
        assert chat.messages[0] is result
    assert (
        read([tool("a", "b", IMAGE)], tool_images="note").messages[0]["content"].count("\n\n") == 2
    )


def test_a_latest_reminder_may_hold_an_image():
    chat = read([{"role": "latest_reminder", "content": ["late", IMAGE]}])
    assert chat.messages[0]["content"] == "late\n\n@0@"


def turn(role):
    return {"role": role, "content": [IMAGE] if role == "user" else "x"}


@pytest.mark.parametrize(
    ("roles", "earlier"),
    [
        ("user", [False]),
        ("user user", [False, False]),
        ("user assistant user", [True, False]),
        ("user assistant tool", [True]),
        ("user assistant tool assistant user tool user", [True, False, False]),
        ("user system user", [False, False]),
        ("user assistant", [False]),  # an answer that is to be continued
        ("user assistant user assistant", [True, False]),
    ],
)
def test_images_of_earlier_turns_are_those_that_were_answered(roles, earlier):
    chat = read([turn(role) for role in roles.split()])
    assert [image.earlier for image in chat.images] == earlier
    assert rules.has_images([turn(role) for role in roles.split()])
    assert not rules.has_images([turn("assistant")])


def test_parts_that_are_checked_only_when_read_are_named():
    def parts():
        yield IMAGE
        raise ValueError("1 validation error\n  Field required")

    with pytest.raises(RuleError, match=r"messages\[0\].content: 1 validation error Field"):
        read([{"role": "user", "content": parts()}])
