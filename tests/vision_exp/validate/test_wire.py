"""Servers that send malformed bytes, slowly, too much or not to the end: known within the time."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from vision_exp.validate import client as clients
from vision_exp.validate import run
from vision_exp.validate.__main__ import main
from vision_exp.validate.checks import Check, Session, at_once
from vision_exp.validate.client import Answer, BadReply, Client, Cut, Refused, TooLate
from vision_exp.validate.command import NO_SERVER
from vision_exp.validate.judge import Verdict

Send = Callable[[bytes], None]
PIECE = b'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": null}]}\n\n'
LAST = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'


@contextmanager
def sending(
    *parts: bytes, pause: float = 0.0, again: bool = False, timeout: float = 0.6
) -> Iterator[Client]:
    """A client of a server that replies in these bytes, head and all; ``again``: without end."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            try:
                for part in parts:
                    self.wfile.write(part)
                while again:
                    time.sleep(pause)
                    self.wfile.write(parts[-1])
            except OSError:
                return  # the client hung up

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield Client(f"http://127.0.0.1:{server.server_port}/v1", "m", timeout=timeout)
    finally:
        server.shutdown()
        server.server_close()


HEAD = b"HTTP/1.0 200 OK\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
HELLO = ["Hello"]
#: Seconds after which a test fails that would wait without end.
TOO_LONG = 20


def ask(client: Client) -> Answer:
    return asyncio.run(asyncio.wait_for(client.ask(HELLO), TOO_LONG))


def cancel(client: Client) -> Cut:
    return asyncio.run(asyncio.wait_for(client.cancel(HELLO), TOO_LONG))


@pytest.mark.parametrize(
    "parts",
    [(HEAD, b" "), (CHUNKED, b"1\r\n \r\n"), (b"HTTP/1.1 200 OK\r\nX: ", b"x")],
    ids=["body", "chunks", "head"],
)
def test_a_reply_that_drips_is_given_up(parts: tuple[bytes, ...]) -> None:
    started = time.monotonic()
    with (
        sending(*parts, pause=0.1, again=True) as client,
        pytest.raises(TooLate, match=r"no whole reply within 0\.6 s"),
    ):
        ask(client)
    assert time.monotonic() - started < 3


@pytest.mark.parametrize(
    ("part", "pause"), [(b": ping\n\n", 0.1), (b"data: xxxxx", 0.02)], ids=["pings", "no line ends"]
)
def test_a_stream_without_a_piece_is_given_up(part: bytes, pause: float) -> None:
    started = time.monotonic()
    with (
        sending(HEAD, part, pause=pause, again=True) as client,
        pytest.raises(TooLate, match=r"no piece of a streamed answer within 0\.6 s"),
    ):
        cancel(client)
    assert time.monotonic() - started < 3


def test_a_stream_that_pauses_after_its_first_piece_is_running() -> None:
    with sending(HEAD, PIECE, b": ping\n\n", pause=2.0, again=True) as client:
        assert cancel(client) == Cut(1)


def test_what_is_kept_of_a_reply_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "LARGEST_REPLY", 1 << 18)
    with sending(HEAD, b" " * 4096, again=True, timeout=60) as client:
        with pytest.raises(BadReply, match="more than 262144 bytes"):
            ask(client)
        with pytest.raises(BadReply, match="more than 262144 bytes"):
            cancel(client)
        assert asyncio.run(client.cancel_early(HELLO)).pieces == 0


@pytest.mark.parametrize(
    ("events", "pieces", "ended", "error"),
    [
        (PIECE, 1, "", "cut off after 1 pieces"),
        (PIECE + LAST, 1, "the answer had ended ('stop')", ""),
        (PIECE + LAST.rstrip(), 1, "the answer had ended ('stop')", ""),
        (PIECE + b"data: [DONE]", 1, "the stream was complete", ""),
        (b'data: {"error": "no"}', 0, "", "'no'"),
        (b"data: " + b"[" * 100_000 + b"\n\n", 0, "", "an event was no JSON that can be read"),
        (b"data: {oops\n\n", 0, "", "an event was no JSON that can be read"),
        (b"", 0, "the reply was no stream of events", ""),
    ],
    ids=["cut off", "stop", "no line end", "done", "error", "deep", "no JSON", "nothing"],
)
def test_how_a_stream_ends(
    events: bytes, pieces: int, ended: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "LISTEN", 2.0)
    with sending(HEAD + events, timeout=10) as client:
        cut = cancel(client)
    assert cut.pieces == pieces
    assert cut.ended.startswith(ended) and bool(cut.ended) == bool(ended)
    assert cut.error.startswith(error) and bool(cut.error) == bool(error)


def _chat(**fields: object) -> bytes:
    choice = {"message": {"content": "a"}} | fields
    reply = {"choices": [choice], "usage": {"prompt_tokens": 1}}
    return HEAD + json.dumps(reply).replace("0.5", "1" + "0" * 400).encode()


@pytest.mark.parametrize(
    "reply",
    [
        HEAD + b"[" * 200_000,
        HEAD + b'{"choices": ' + b"[" * 900 + b"]" * 900 + b"}",
        _chat(logprobs={"content": 5}),
        _chat(logprobs=[]),
        _chat(logprobs={"content": [{"token": "a", "logprob": -1, "top_logprobs": 7}]}),
        _chat(logprobs={"content": [{"token": "a", "logprob": 0.5}]}),
        _chat(logprobs={"content": [{"token": "a", "logprob": True}]}),
        _chat().replace(b": 1}", b": true}"),
    ],
    ids=["deep", "fairly deep", "content", "logprobs", "top", "400 digits", "bool", "bool usage"],
)
def test_malformed_replies_fail_their_check(reply: bytes) -> None:
    async def check(session: Session) -> Verdict:
        await session.ask(HELLO)
        return Verdict(True, "", "")

    with sending(reply, timeout=10) as client:
        found = asyncio.run(run.run(Check("malformed", check), Session(**vars(client))))
    assert found["state"] == "failed"
    assert "/chat/completions sent a malformed reply: " in found["detail"]


def test_a_redirect_tells_where_to() -> None:
    head = b"HTTP/1.0 301 Moved\r\nLocation: https://else/v1/models\r\n\r\n"
    with (
        sending(head) as client,
        pytest.raises(Refused, match="HTTP 301 to https://else/v1/models"),
    ):
        asyncio.run(client.first_model())


def test_calls_at_once_give_their_results_in_order_or_the_first_error() -> None:
    ended = []

    async def call(index: int) -> Answer:
        await asyncio.sleep(0.05 * (6 - index))
        ended.append(index)
        if index > 3:
            raise ValueError(index)
        return Answer(str(index), 1)

    async def calls(*indices: int) -> list[str]:
        return [answer.text for answer in await at_once([call(index) for index in indices])]

    assert asyncio.run(calls(0, 1, 2)) == ["0", "1", "2"]
    ended.clear()
    with pytest.raises(ValueError, match="4"):
        asyncio.run(calls(0, 4, 5))
    assert ended == [5, 4, 0]


def test_a_name_that_is_looked_up_for_long_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(*_: object, **__: object) -> None:
        time.sleep(20)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    started = time.monotonic()
    assert main(["--url", "http://nowhere.invalid/v1", "--timeout", "0.5"]) == NO_SERVER
    assert time.monotonic() - started < 10
    assert "no whole reply within 0.5 s" in capsys.readouterr().err
