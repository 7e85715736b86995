"""Checks over HTTP of what clients really send, with the official `openai` and `anthropic` ones."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import rig_chat as rig
from checks_chat_images import web_server
from checks_http import status_400
from conversations import ASK, CALL, setting
from rig_chat import part, text
from rig_http import Api

from vision_exp import settings
from vision_exp.chat import rules

URL = part(0)["image_url"]["url"]
DATA = URL.partition(",")[2]
#: 0.4 MB as base64, which no error may repeat.
LARGE = rig.data_url(os.urandom(300_000))
MOST = 4096


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def error_of(action: Callable[[], Any]) -> Any:
    """The error that the server answers with; its body is short and repeats no data."""
    try:
        action()
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        body = error.response.text
        assert error.status_code == 400, (error.status_code, body[:2000])
        assert len(body) <= MOST, len(body)
        assert LARGE[1000:1100] not in body and DATA[30:90] not in body
        return error
    raise AssertionError("accepted")


def same_features(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.identifier == other.identifier
        mine, theirs = one.mm_position, other.mm_position
        assert (mine.offset, mine.length) == (theirs.offset, theirs.length)
        assert mine.is_embed.equal(theirs.is_embed)


def check_clients_input_image_without_detail(api: Api) -> None:
    make = api.client.responses.create
    words = {"type": "input_text", "text": "a"}
    image = {"type": "input_image", "image_url": URL}
    seen = []
    for detail in ({"detail": "high"}, {}, {"detail": None}):
        one = {**image, **detail}
        for item in ({"role": "user"}, {"role": "user", "type": "message"}):
            message = {**item, "content": [words, one, words, one]}
            made = make(model=api.model, input=[message], max_output_tokens=1)
            assert made.usage.input_tokens == len(api.last_ids())
            assert api.last_images() == 2
            seen.append(api.last_ids())
    assert all(ids == seen[0] for ids in seen)
    stream = make(model=api.model, input=[message], max_output_tokens=1, stream=True)
    assert list(stream)[-1].type.startswith("response.") and api.last_ids() == seen[0]


def check_clients_errors_are_short(api: Api) -> None:
    """No error repeats the image, whatever else is wrong with the request."""
    image = {"type": "input_image", "image_url": LARGE}
    part_ = {"type": "image_url", "image_url": {"url": LARGE}}
    source = {"type": "base64", "media_type": "image/png", "data": LARGE.partition(",")[2]}
    block = {"type": "image", "source": source}
    make, chat = api.client.responses.create, api.client.chat.completions.create
    for wrong in ({}, {"temperature": "hot"}, {"extra_body": {"stream_options": 5}}):
        error_of(lambda w=wrong: make(model=api.model, input=[user(image)], **w))
        error_of(lambda w=wrong: chat(model=api.model, messages=[user(part_)], **w))
    for odd in (
        {**image, "detail": 7},
        {**image, "type": "input_picture"},
        {"type": "input_image", "image_url": {"url": LARGE}},
        {"type": "image_url", "image_url": {"url": LARGE}},
        {"type": "input_image", "file_id": LARGE},
    ):
        error_of(lambda o=odd: make(model=api.model, input=[user(o)]))
        error_of(lambda o=odd: make(model=api.model, input=[{"role": "user", "content": o}]))
    for odd in (
        {"type": "image_url", "image_url": [LARGE]},
        {"type": "image_url", "image_url": {"url": [LARGE]}},
        {"type": "picture", "image_url": {"url": LARGE}},
        {"type": "text", "text": {"url": LARGE}},
        {"type": "image_url", "image_url": {"url": LARGE[22:]}},
        {"type": "image_url", "image_url": {"url": f"file:///{LARGE}"}},
    ):
        error_of(lambda o=odd: chat(model=api.model, messages=[user(o)]))
        error_of(lambda o=odd: chat(model=api.model, messages=[{"role": "user", "content": o}]))
    create, count = api.anthropic.messages.create, api.anthropic.messages.count_tokens
    for content in (
        [block],
        [{**block, "type": "picture"}],
        [{**block, "source": [source]}],
        [{"type": "tool_result", "tool_use_id": "c", "content": {"image": LARGE}}],
    ):
        messages = [{"role": "user", "content": content}]
        error_of(lambda m=messages: create(model=api.model, max_tokens=1, messages=m))
        error_of(lambda m=messages: count(model=api.model, messages=m))
    for path, body in (
        ("/v1/completions", {"prompt": {"image": LARGE}}),
        ("/tokenize", {"messages": [user({**part_, "type": "picture"})]}),
        ("/inference/v1/generate", {"token_ids": LARGE, "sampling_params": {"max_tokens": 1}}),
    ):
        code, answer = api.post(path, {"model": api.model, **body})
        assert code == 400 and len(answer) <= MOST and LARGE[1000:1100] not in answer, path
    named = {"type": "input_image", "file_id": "f1"}
    assert "file_id" in str(error_of(lambda: make(model=api.model, input=[user(named)])))
    # What is short already stays as vLLM writes it.
    error = error_of(lambda: chat(model=api.model, messages=[ASK], temperature="hot"))
    assert "temperature" in str(error) and "hot" in str(error), error


def check_clients_unreadable_history(api: Api) -> None:
    svg = rig.data_url(b"<svg/>", "data:image/svg+xml;base64,")
    with web_server() as address:
        for url in (svg, URL[:-40], f"{address}/expired.png", ""):
            unreadable_in_history(api, {"type": "image_url", "image_url": {"url": url}})


def unreadable_in_history(api: Api, bad: dict[str, Any]) -> None:
    answer = {"role": "assistant", "content": "ok"}
    newest = user(text("now"), part(1))
    history = [user(text("then"), bad, part(0)), answer, newest]
    error = str(error_of(lambda: api.chat(history)))
    assert "messages[0].content[1]" in error and settings.UNREADABLE_IMAGES.name in error
    with setting(settings.UNREADABLE_IMAGES.name, "note"):
        api.chat(history)
        ids = api.last_ids()
        assert api.last_images() == 2
        api.chat([user(text("then"), text(rules.UNREADABLE_NOTE), part(0)), answer, newest])
        assert api.last_ids() == ids
        # Never in the newest turn, of which a tool's result is a part.
        error_of(lambda: api.chat([user(part(0)), answer, user(bad)]))
        error_of(lambda: api.chat([ASK, answer, user(bad), {**ASK, "content": "?"}]))
        api.chat([user(bad), answer, ASK])
        assert api.last_images() == 0


def check_clients_anthropic_images(api: Api) -> None:
    create, count = api.anthropic.messages.create, api.anthropic.messages.count_tokens
    good = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
    used = create(model=api.model, max_tokens=1, messages=[user(good)]).usage.input_tokens
    assert used == len(api.last_ids()) and api.last_images() == 1

    def refused(where: str, **body: Any) -> None:
        for action, limit in ((create, {"max_tokens": 1}), (count, {})):
            told = error_of(lambda a=action, m=limit: a(model=api.model, **{**m, **body}))
            assert where in str(told)

    for source, words in (
        (None, "no source"),
        ({}, "no source"),
        ({"type": "file", "file_id": "f1"}, "'file'"),
        ({"type": "base64", "media_type": "image/png"}, "'data'"),
        ({"type": "url"}, "'url'"),
        ({"type": ["url"]}, "['url']"),
    ):
        bad = {"type": "image", **({} if source is None else {"source": source})}
        refused("messages[0].content[1]", messages=[user(good, bad)])
        refused(words, messages=[user(bad)])
        call = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "c1", "content": [text("a"), bad]}
        turns = [ASK, {"role": "assistant", "content": [call]}, user(result)]
        refused("messages[2].content[0].content[1]", messages=turns)
    for source in ([good], good["source"], {"type": "url", "url": URL}):
        turns[2] = user(result | {"content": [text("a"), {"type": "document", "source": source}]})
        refused("messages[2].content[0].content[1]", messages=turns)
    for role in ("assistant", "system"):
        turns = [ASK, {"role": role, "content": [text("a"), good]}, ASK]
        refused("messages[1].content[1]", messages=turns)
        inner = {"type": "tool_result", "tool_use_id": "c1", "content": [good]}
        turns[1] = {"role": role, "content": [inner]}
        refused("messages[1].content[0].content[0]", messages=turns)
    refused("system[1]", messages=[ASK], system=[text("a"), good])


def check_clients_mm_processor_kwargs(api: Api) -> None:
    image = user(part(0), {**part(1), "uuid": "one"})
    api.chat([image])
    plain, before = api.last_ids(), api.core.requests[-1].mm_features

    def ask(kwargs: Any) -> None:
        api.chat([image], extra_body={"mm_processor_kwargs": kwargs})

    ask({"max_pixels": 10**7})  # more than the checkpoint's own: nothing is lowered
    assert api.last_ids() == plain
    same_features(before, api.core.requests[-1].mm_features)
    ask({"max_pixels": 40 * 42 * 42})
    lowered, features = api.last_ids(), api.core.requests[-1].mm_features
    assert len(lowered) < len(plain) and api.last_images() == 2
    for one, other in zip(features, before, strict=True):
        assert one.mm_position.length <= 40 < other.mm_position.length
        assert one.identifier != other.identifier
    api.chat([image])
    assert api.last_ids() == plain
    same_features(before, api.core.requests[-1].mm_features)
    for wrong in (
        {"min_pixels": 3},
        {"size": {"height": 2}},
        {"max_pixels": 3},
        {"max_pixels": URL},
    ):
        assert next(iter(wrong)) in str(error_of(lambda w=wrong: ask(w)))
    body = {"mm_processor_kwargs": {"do_resize": False}}
    item = {"role": "user", "content": [{"type": "input_image", "image_url": URL}]}
    if responses_take_options():
        make = api.client.responses.create
        error = error_of(lambda: make(model=api.model, input=[item], extra_body=body))
        assert "do_resize" in str(error)


def responses_take_options() -> bool:
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    return "mm_processor_kwargs" in ResponsesRequest.model_fields


def check_clients_cut_and_unknown_images(api: Api) -> None:
    """The message names the cause: truncation, or a uuid that nothing is known by."""
    turn = [user(part(0), text("a"), part(1), text("b " * 40))]
    for left in (5, 60):
        body = {"truncate_prompt_tokens": left}
        error = error_of(lambda b=body: api.chat(turn, extra_body=b))
        assert "truncate_prompt_tokens cuts" in str(error) and "2 images" in str(error)
    api.chat(turn, extra_body={"truncate_prompt_tokens": 2000})
    assert api.last_images() == 2
    alone = {"type": "image_url", "image_url": None, "uuid": "never-seen"}
    error = error_of(lambda: api.chat([user(part(0), alone)]))
    assert "image 1 is only its uuid 'never-seen'" in str(error), error
    api.chat([user({**part(2), "uuid": "seen"})])
    api.chat([user({**alone, "uuid": "seen"})])
    assert api.last_images() == 1


def check_clients_image_as_text_is_warned(api: Api) -> None:
    """Once for each kind of place, in every form of base64."""
    data = rig.png(rig.sample_image(3, (200, 150)).rotate(30)) + os.urandom(400)
    encoded = rig.data_url(data, "")
    args = json.dumps({"a": encoded}).replace("/", r"\/")
    answer = {"role": "assistant", "content": "ok"}
    call = {**CALL, "function": {"name": "f", "arguments": args}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "done"}
    places = {
        "content of system messages": [{"role": "system", "content": encoded}, ASK],
        "content of tool messages": [
            ASK,
            {**answer, "tool_calls": [CALL]},
            {**result, "content": [text("a"), text(encoded)]},
        ],
        "arguments of tool calls": [ASK, {**answer, "tool_calls": [call]}, result],
        "reasoning of assistant messages": [ASK, {**answer, "reasoning": encoded}, ASK],
        "content of assistant messages": [ASK, {**answer, "content": encoded}, ASK],
    }
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logging.getLogger("vllm.vision_exp").addHandler(handler)
    try:
        for kind, messages in places.items():
            before = len(found)
            for _ in range(2):
                api.chat(messages)
            assert len(found) == before + 1 and kind in found[-1], (kind, found[before:])
    finally:
        logging.getLogger("vllm.vision_exp").removeHandler(handler)


def check_clients_tool_text_and_reminders(api: Api) -> None:
    """Texts of a tool result as in stock vLLM; a latest reminder may hold an image."""
    answer = {"role": "assistant", "content": "", "tool_calls": [CALL]}

    def prompt_of(result: Any, *images: Any) -> str:
        turn = {"role": "tool", "tool_call_id": "c1", "content": result}
        api.chat([user(text("go"), *images), answer, turn])
        return api.server.tokenizer.decode(api.last_ids())

    parts = [text("one"), text("two")]
    assert prompt_of(parts) == prompt_of("one\ntwo")
    assert prompt_of(parts, part(0)) == prompt_of("one\ntwo", part(0))
    with setting(settings.TOOL_IMAGES.name, "note"):
        noted = prompt_of([*parts, part(0)])
        assert noted == prompt_of(f"one\n\ntwo\n\n{rules.TOOL_IMAGE_NOTE}")
    reminder = {"role": "latest_reminder", "content": [text("late"), part(1)]}
    api.chat([user(part(0)), reminder])
    assert api.last_images() == 2
    status_400(lambda: api.chat([{**reminder, "role": "developer"}, ASK]), "developer")
