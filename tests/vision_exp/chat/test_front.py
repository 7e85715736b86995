"""What stands before the API server's endpoints, without one."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from textwrap import wrap
from typing import Any

import pytest

from vision_exp.chat.front import Front, short, short_body, short_errors, with_detail

DATA = base64.b64encode(random.Random(1).randbytes(3000)).decode()
IMAGE = {"type": "input_image", "image_url": f"data:image/png;base64,{DATA}"}
TEXT = {"type": "input_text", "text": "input_image"}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda part: part,
        lambda part: {"role": "user", "content": [TEXT, part]},
        lambda part: {"type": "message", "role": "system", "content": [part]},
        lambda part: {"type": "function_call_output", "call_id": "c", "output": [TEXT, part]},
    ],
)
def test_an_image_gets_the_detail_that_it_lacks(wrap):
    for lacking in (IMAGE, {**IMAGE, "detail": None}):
        body = json.dumps({"model": "m", "input": [TEXT, wrap(lacking)]}).encode()
        expected = {"model": "m", "input": [TEXT, wrap({**IMAGE, "detail": "auto"})]}
        assert json.loads(with_detail(body)) == expected
    given = json.dumps({"input": [wrap({**IMAGE, "detail": "high"})]}, indent=3).encode()
    assert with_detail(given) is given


@pytest.mark.parametrize(
    "body",
    [b"", b"input_image", b'{"input": "input_image"}', b'["input_image"]', b"\xff input_image"],
)
def test_other_bodies_stay(body):
    assert with_detail(body) is body


def test_errors_lose_data_and_length_only():
    plain = json.dumps({"error": {"message": "no", "code": 400}}, indent=1).encode()
    assert short_body(plain) is plain
    forms = [DATA, DATA.replace("+", "-").replace("/", "_")]
    forms += [DATA.replace("/", sign) for sign in ("\\/", "\\u002f", "\\\\u002F")]
    # Whatever a line's length and its end, also below the length that is cut anyway.
    ends = ("\n", "\r\n", " \n", "\n\t", "\\n", "\\r\\n", "\\\\n")
    forms += [end.join(wrap(DATA[:600], width)) for width in (6, 20, 64, 76) for end in ends]
    forms += [gap.join(wrap(DATA[:600], width)) for width in (20, 76) for gap in (" ", "\t")]
    forms += [gap.join(wrap(DATA[:300], 76)) for gap in ("', '", '", "', "%0D")]
    for coded in forms:
        body = json.dumps({"error": {"message": f"bad {coded} here", "code": 400}}).encode()
        shown = json.loads(short_body(body))["error"]
        assert shown["message"].startswith("bad <") and shown["message"].endswith("> here")
        assert shown["code"] == 400 and len(shown["message"]) < 60
    cut = f"got 'data:image/png;charset=a;BASE64, {DATA[:20]}"
    assert short(cut) == "got 'data:image/png;charset=a<29 characters of data>"
    names = ", ".join(f"'{name}'" for name in ("image_generation_call", "computer_call_output") * 3)
    assert short(names) == names
    assert len(short("word " * 9000)) < 1600 and short("a\nword\n" * 4) == "a\nword\n" * 4
    # A body that holds an image a hundred times is not searched from end to end.
    assert len(short("bad " + f"{DATA[:99]} " * 90_000)) < 1600
    assert len(short_body(b"no json " * 9000)) < 1600


def test_validation_errors_are_few_and_keep_short_inputs():
    wrong = {"type": "int", "loc": ("body", "n"), "msg": "m", "input": {"a": [1, "b"]}}
    assert short_errors([wrong]) == [wrong]
    long = {**wrong, "input": {"content": [IMAGE] * 50}}
    shown = short_errors([long] * 248)
    assert len(shown) == 9 and "240 more" in shown[-1]["msg"]
    ends = (DATA[:16], DATA[100:150], DATA[-16:])
    assert len(str(shown)) < 4000 and not any(end in str(shown) for end in ends)


def run(app: Any, *messages: dict[str, Any], path: str = "/v1/responses") -> list[dict[str, Any]]:
    """What is sent for a request in these messages."""
    sent: list[dict[str, Any]] = []
    waiting = list(messages)

    async def receive() -> dict[str, Any]:
        return waiting.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path}
    asyncio.run(Front(app)(scope, receive, send))
    return sent


def piece(body: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_request_arrives_whole_and_its_client_may_go():
    body = json.dumps({"input": [IMAGE]}).encode()
    got: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        got.extend([await receive(), await receive()])

    gone = {"type": "http.disconnect"}
    run(app, piece(body[:100], True), piece(body[100:], False), gone)
    assert json.loads(got[0]["body"])["input"][0]["detail"] == "auto" and got[1] == gone
    got.clear()
    run(app, piece(body[:100], True), gone, gone)
    assert got == [gone, gone]
    got.clear()
    run(app, piece(body, False), gone, path="/v1/chat/completions")
    assert got == [piece(body, False), gone]


def test_nothing_is_read_of_a_request_that_nobody_asks_for():
    async def app(scope: Any, receive: Any, send: Any) -> None:
        pass

    assert run(app) == []  # it would ask for a message that is not there


@pytest.mark.parametrize("status", [200, 400, 500])
def test_streams_pass_and_errors_are_shortened(status):
    start = {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"9")],
    }
    parts = [b'{"error": "', DATA.encode(), b'"}']

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start)
        for part in parts:
            more = part is not parts[-1]
            await send({"type": "http.response.body", "body": part, "more_body": more})

    sent = run(app, piece(b"", False))
    if status == 200:
        assert sent[0] is start and [message["body"] for message in sent[1:]] == parts
        return
    first, second = sent
    assert first["status"] == status and first["headers"][0] == start["headers"][0]
    length = (b"content-length", str(len(second["body"])).encode())
    assert first["headers"][1:] == [length]
    assert json.loads(second["body"]) == {"error": f"<{len(DATA)} characters of data>"}
