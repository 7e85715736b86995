"""Servers that send odd bytes, too slowly, too much or not to the end: known within the time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from vision_exp.validate import checks, run, stream, wire
from vision_exp.validate.client import Client, Refused, TooLate
from vision_exp.validate.judge import Verdict
from vision_exp.validate.reply import BadReply
from vision_exp.validate.stream import cancel, cancel_early
from vision_exp.validate.threads import at_once

Send = Callable[[bytes], None]
PIECE = b'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": null}]}\n\n'
LAST = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'


@contextmanager
def sending(*parts: bytes, pause: float = 0.0, again: bool = False) -> Iterator[Client]:
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
        yield Client(f"http://127.0.0.1:{server.server_port}/v1", "m", timeout=0.6)
    finally:
        server.shutdown()
        server.server_close()


HEAD = b"HTTP/1.0 200 OK\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
HELLO: list[dict[str, Any]] = [{"type": "text", "text": "Hello"}]


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
        client.ask(HELLO)
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
        cancel(client, HELLO)
    assert time.monotonic() - started < 3


def test_a_stream_that_pauses_after_its_first_piece_is_running() -> None:
    with sending(HEAD, PIECE, b": ping\n\n", pause=2.0, again=True) as client:
        assert cancel(client, HELLO) == stream.Cut(1)


def test_what_is_kept_of_a_reply_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MOST", 1 << 18)
    with sending(HEAD, b" " * 4096, again=True) as client:
        client.timeout = 60
        with pytest.raises(BadReply, match="more than 262144 bytes"):
            client.ask(HELLO)
        with pytest.raises(BadReply, match="more than 262144 bytes"):
            cancel(client, HELLO)
        assert cancel_early(client, HELLO).pieces == 0
        monkeypatch.setattr(stream, "LONGEST", 1 << 12)
        assert "a line of more than 4096 bytes" in cancel(client, HELLO).error


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
)
def test_how_a_stream_ends(
    events: bytes, pieces: int, ended: str, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "LISTEN", 2.0)
    with sending(HEAD + events) as client:
        client.timeout = 10
        cut = cancel(client, HELLO)
    assert cut.pieces == pieces
    assert cut.ended.startswith(ended) and bool(cut.ended) == bool(ended)
    assert cut.error.startswith(error) and bool(cut.error) == bool(error)


def test_a_stream_that_is_cut_off_fails() -> None:
    found = checks._not_cut([stream.Cut(1, error="cut off after 1 pieces")])
    assert found and found.state == "failed" and "cut off after 1 pieces" in found.detail


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
def test_odd_replies_fail_their_check(reply: bytes) -> None:
    def check(lab: checks.Lab) -> Verdict:
        lab.ask(HELLO)
        return Verdict("passed", "", "")

    with sending(reply) as client:
        client.timeout = 10
        found = run.run("odd", check, checks.Lab(client, True, True))
    assert found["state"] == "failed"
    assert "/chat/completions replied oddly: " in found["detail"]


def test_a_redirect_tells_where_to() -> None:
    head = b"HTTP/1.0 301 Moved\r\nLocation: https://else/v1/models\r\n\r\n"
    with (
        sending(head) as client,
        pytest.raises(Refused, match="HTTP 301 to https://else/v1/models"),
    ):
        client.models()


def test_calls_at_once_give_their_results_in_order_or_the_first_error() -> None:
    def call(index: int) -> int:
        time.sleep(0.05 * (6 - index))
        if index > 3:
            raise ValueError(index)
        return index

    assert at_once([lambda i=i: call(i) for i in range(3)]) == [0, 1, 2]  # type: ignore[misc]
    with pytest.raises(ValueError, match="4"):
        at_once([lambda i=i: call(i) for i in (0, 4, 5)])  # type: ignore[misc]
