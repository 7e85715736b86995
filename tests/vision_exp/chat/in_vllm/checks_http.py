"""Checks over HTTP: status codes and prompts of every endpoint (see rig_http.py)."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import openai
import rig_chat as rig
from checks_chat_images import bad_parts
from conversations import ASK
from PIL import Image
from rig_chat import SENTINEL, part, text
from rig_http import Api

from vision_exp.engine.failures import client
from vision_exp.layout import PLACEHOLDER


def status_400(action: Any, *fragments: str) -> None:
    try:
        action()
    except openai.BadRequestError as error:
        for fragment in fragments:
            assert fragment in str(error), f"{fragment!r} not in {error}"
    else:
        raise AssertionError(f"accepted; expected {fragments}")


USER = {"role": "user", "content": [text("see"), part(0), text("and"), part(1)]}


def check_http_chat(api: Api) -> None:
    answer = api.chat([USER])
    ids = api.last_ids()
    assert answer.usage.prompt_tokens == len(ids) and api.last_images() == 2
    image_tokens = sum(token in rig.SENTINEL_IDS for token in ids)
    details = answer.usage.prompt_tokens_details
    assert details.multimodal_tokens == {"image": image_tokens}, details
    api.chat([{"role": "system", "content": f"quote {PLACEHOLDER} <image>"}, USER])
    assert api.last_images() == 2
    chunks = list(api.chat([USER], stream=True))
    assert chunks and api.last_ids() == ids


def check_http_roles(api: Api) -> None:
    for role, extra in (("system", {}), ("assistant", {}), ("tool", {"tool_call_id": "c1"})):
        bad = {"role": role, "content": [part(0)], **extra}
        for stream in (False, True):
            status_400(
                lambda b=bad, s=stream: api.chat([ASK, b, ASK], stream=s),
                "messages[1].content[0]",
                role,
            )
    api.chat([USER])


def check_http_bad_images(api: Api) -> None:
    for name, bad in bad_parts().items():
        if name == "nothing":
            continue  # the server's own validation refuses it
        for stream in (False, True):
            status_400(
                lambda b=bad, s=stream: api.chat(
                    [{"role": "user", "content": [text("a"), b]}], stream=s
                ),
                "messages[0].content[1]",
            )
        api.chat([USER])
        assert api.last_images() == 2, name


def check_http_images_are_seen_as_a_person_sees_them(api: Api) -> None:
    """The same image to the model: 16 bit or 8, with the file's end or without."""
    grey = np.arange(240, dtype=np.uint8).reshape(12, 20)
    whole = rig.png(Image.fromarray(grey))
    seen = set()
    for data in (whole, rig.png(Image.fromarray(grey.astype(np.uint16) * 257)), whole[:-12]):
        url = {"type": "image_url", "image_url": {"url": rig.data_url(data)}}
        api.chat([{"role": "user", "content": [url]}])
        (feature,) = api.core.requests[-1].mm_features
        seen.add(feature.identifier)
    assert len(seen) == 1


def check_http_limit(api: Api) -> None:
    parts = [part(number) for number in range(rig.LIMIT + 1)]
    status_400(lambda: api.chat([{"role": "user", "content": parts}]), "--limit-mm-per-prompt")
    api.chat([{"role": "user", "content": parts[1:]}])
    assert api.last_images() == rig.LIMIT


def check_http_reserved_ids(api: Api) -> None:
    """Every endpoint that takes a prompt, streams included, and the next request works."""
    complete = api.client.completions.create
    for token in (129257, 129261, 129264):
        for stream in (False, True):
            status_400(
                lambda t=token, s=stream: complete(
                    model=api.model, prompt=[5, t], max_tokens=1, stream=s
                ),
                str(token),
            )
        body = {"token_ids": [5, token], "sampling_params": {"max_tokens": 1}}
        code, answer = api.post("/inference/v1/generate", body)
        assert code == 400 and str(token) in str(answer), (code, answer)
    for words in (PLACEHOLDER, SENTINEL):
        status_400(
            lambda w=words: complete(model=api.model, prompt=f"a {w}", max_tokens=1), "reserved"
        )
        code, answer = api.post("/tokenize", {"model": api.model, "prompt": words})
        assert code == 400, (code, answer)
    assert complete(model=api.model, prompt=[5, 6], max_tokens=1).choices
    code, answer = api.post("/inference/v1/generate", {**body, "token_ids": [5, 6]})
    assert code == 200, answer


def check_http_tokenize(api: Api) -> None:
    code, answer = api.post("/tokenize", {"model": api.model, "messages": [USER]})
    assert code == 200, answer
    api.chat([USER])
    assert answer["tokens"] == api.last_ids()


def check_http_responses(api: Api) -> None:
    image = {"type": "input_image", "image_url": part(0)["image_url"]["url"], "detail": "auto"}
    words = {"type": "input_text", "text": f"a {PLACEHOLDER}"}
    make = api.client.responses.create
    content = [words, image, words, image]
    make(model=api.model, input=[{"role": "user", "content": content}], max_output_tokens=1)
    api.core.requests.pop()
    make(model=api.model, input=[{"role": "user", "content": content}], max_output_tokens=1)
    assert api.last_images() == 2
    for role in ("system", "developer"):
        bad = [{"role": role, "content": [image]}, {"role": "user", "content": "x"}]
        status_400(
            lambda b=bad: make(model=api.model, input=b, max_output_tokens=1), role, "content[0]"
        )


def check_http_anthropic(api: Api) -> None:
    data = part(0)["image_url"]["url"].partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    image = {"type": "image", "source": source}
    words = {"type": "text", "text": f"{PLACEHOLDER}"}
    call = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [words, image]}
    for messages, images in (
        ([{"role": "user", "content": [words, image, words]}], 1),
        (
            [
                {"role": "user", "content": "go"},
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result]},
            ],
            1,
        ),
    ):
        body = {"model": api.model, "max_tokens": 1, "messages": messages}
        code, answer = api.post("/v1/messages", body)
        assert code == 200, answer
        assert api.last_images() == images
        code, answer = api.post("/v1/messages", {**body, "top_k": -9})
        assert code == 400 and "top_k" in str(answer), (code, answer)
    bad = {**source, "data": "aGVsbG8="}
    body["messages"] = [{"role": "user", "content": [{"type": "image", "source": bad}]}]
    code, answer = api.post("/v1/messages", body)
    assert code == 400 and "content[0]" in str(answer), (code, answer)


def check_http_render(api: Api) -> None:
    """What one server renders, another takes, unless its ids were changed on the way."""
    code, rendered = api.post(
        "/v1/chat/completions/render", {"model": api.model, "messages": [USER], "max_tokens": 1}
    )
    assert code == 200, rendered
    code, answer = api.post("/inference/v1/generate", rendered)
    assert code == 200, answer
    api.chat([USER])
    direct, sent = (api.core.requests[i].mm_features for i in (-1, -2))
    for one, other in zip(direct, sent, strict=True):
        assert one.mm_position.get_num_embeds() == other.mm_position.get_num_embeds()
        assert one.mm_position.is_embed.equal(other.mm_position.is_embed)
    # Places, hashes and data of different numbers or kinds.
    for key, given in rendered["features"].items():
        for value in ({}, {"image": given["image"][:1]}, {"video": given["image"]}):
            changed = {**rendered, "features": {**rendered["features"], key: value}}
            code, answer = api.post("/inference/v1/generate", changed)
            assert code == 400, (key, value, code, answer)
    ids = rendered["token_ids"]
    start = ids.index(129257)
    places = json.loads(json.dumps(rendered["features"]["mm_placeholders"]))
    places["image"][1]["offset"] += 4
    moved = {**rendered, "features": {**rendered["features"], "mm_placeholders": places}}
    code, answer = api.post("/inference/v1/generate", moved)
    assert code == 400, (code, answer)
    for change in (
        [*ids, 129259],
        [*ids[:start], 129259, *ids[start + 1 :]],
        [*ids[:start], 5, *ids[start + 1 :]],
        [5, *ids[:-1]],
    ):
        code, answer = api.post("/inference/v1/generate", {**rendered, "token_ids": change})
        assert code == 400, (code, answer)


def check_http_failed_image(api: Api) -> None:
    """A request that the engine ends with an error gets 500, and the next one an answer."""
    image = {"type": "input_image", "image_url": part(0)["image_url"]["url"], "detail": "auto"}
    turn = [{"role": "user", "content": [image]}]
    respond = api.client.responses.create
    api.core.failure = "an image cannot be encoded"
    try:
        for n in (1, 2):
            answered_500(lambda n=n: api.chat([USER], n=n))
            # The status of a stream is out before the image fails; it ends with an error.
            broken_stream(lambda n=n: api.chat([USER], n=n, stream=True))
        answered_500(lambda: respond(model=api.model, input=turn, max_output_tokens=1))
        broken_stream(lambda: respond(model=api.model, input=turn, stream=True))
        body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 1}}
        code, answer = api.post("/inference/v1/generate", body)
        assert code == 500, answer
        broken_events(api.text("/inference/v1/generate", {**body, "stream": True}))
        messages = {"model": api.model, "max_tokens": 1, "messages": [{**ASK}], "stream": True}
        events = api.text("/v1/messages", messages)
        assert "event: error" in events and "end_turn" not in events, events
        completions_fail(api)
    finally:
        api.core.failure = None
    assert api.client.completions.create(model=api.model, prompt="a").choices[0].text
    assert api.chat([USER]).choices[0].finish_reason == "length"
    assert [c.choices[0].finish_reason for c in api.chat([USER], stream=True)][-1] == "length"


def completions_fail(api: Api) -> None:
    """/v1/completions takes no images, but the engine can end its requests with an error too."""
    complete = api.client.completions.create
    for prompt, n in (("a", 1), ([5, 6], 2), (["a", "b"], 1)):
        asked: Any = {"model": api.model, "prompt": prompt, "n": n, "max_tokens": 1}
        answered_500(lambda a=asked: complete(**a))
        broken_stream(lambda a=asked: complete(**a, stream=True))
        broken_events(api.text("/v1/completions", {**asked, "stream": True}))


def broken_events(text: str) -> None:
    """A stream that tells the cause, and no finish reason of an answer."""
    assert '"error"' in text and "an image cannot be encoded" in text, text
    assert 'finish_reason":"' not in text.replace(" ", ""), text


def answered_500(action: Any) -> None:
    try:
        action()
    except openai.InternalServerError as error:
        assert error.status_code == 500 and client.MESSAGE in str(error), error
    else:
        raise AssertionError("answered")


def broken_stream(action: Any) -> None:
    found: list[Any] = []
    try:
        found.extend(action())
    except (openai.APIError, httpx.TransportError):
        pass
    else:
        raise AssertionError(f"a stream that looks complete: {found}")
