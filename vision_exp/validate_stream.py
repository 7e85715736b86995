"""Streamed answers that are hung up on, and what is known of them at that moment."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from dataclasses import dataclass
from typing import Any

from vision_exp.validate_client import CHAT, UNKNOWN_FIELD, Client, Refused, Unreachable
from vision_exp.validate_reply import REASONING

#: Seconds for which an answer is read after its first piece: one that was complete by then shows.
LISTEN = 0.05
#: Seconds after which a request is dropped that shall not have answered yet.
EARLY = 0.02
MAX_TOKENS = 400


@dataclass(frozen=True)
class Cut:
    """A stream at the moment of hanging up: pieces of text that had come, and why it had ended.

    ``ended`` is empty while it was running; ``error`` tells what the stream said of an error.
    """

    pieces: int
    ended: str = ""
    error: str = ""


@dataclass
class _Events:
    """Reads server-sent events as they come in, however they are cut up."""

    pieces: int = 0
    ended: str = ""
    error: str = ""
    rest: bytes = b""
    seen: bool = False

    def feed(self, data: bytes) -> None:
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self.seen = True
                self._event(line[5:].strip())

    def close(self) -> None:
        """The server sent all it had."""
        if not self.seen:
            words = self.rest.strip()[:60].decode(errors="replace")
            self.ended = f"the reply was no stream of events but {words!r}"
        self.ended = self.ended or "the stream was complete"

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.ended = self.ended or "the stream was complete"
            return
        try:
            event: Any = json.loads(data)
        except ValueError:
            self.error = f"an event was no JSON: {data[:60]!r}"
            return
        if not isinstance(event, dict):
            return
        if event.get("error"):
            self.error = f"{event['error']!r:.200}"
        choices = event.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return
        delta = choice.get("delta")
        told = delta if isinstance(delta, dict) else {}
        # The first event has the role alone. A token may have no text, but it has its
        # log-probability.
        if choice.get("logprobs") or any(told.get(n) for n in ("content", *REASONING)):
            self.pieces += 1
        if choice.get("finish_reason"):
            self.ended = f"the answer had ended ({choice['finish_reason']})"


def cancel(client: Client, content: list[dict[str, Any]]) -> Cut:
    """Starts a long streamed answer and hangs up soon after its first piece.

    Raises Refused or Unreachable.
    """
    body = client.body(content, MAX_TOKENS) | {"stream": True}
    try:
        # vLLM's; without it a model may have nothing more to say after a word.
        connection, response = _open(client, body | {"ignore_eos": True})
    except Refused as error:
        if error.status not in UNKNOWN_FIELD:
            raise
        connection, response = _open(client, body)
    events = _Events()
    try:
        _read(response, events)
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"{client.url}{CHAT}: the stream broke off: {error!r}") from error
    finally:
        response.close()
        connection.close()
    return Cut(events.pieces, events.ended, events.error)


def _read(response: http.client.HTTPResponse, events: _Events) -> None:
    """Up to the first piece, and then on for as long as `LISTEN` tells."""
    limit = float("inf")
    while not (events.ended or events.error) and time.monotonic() < limit:
        data = response.read1(65536)
        if not data:
            events.close()
            return
        events.feed(data)
        if events.pieces and limit == float("inf"):
            limit = time.monotonic() + LISTEN


def _open(
    client: Client, body: dict[str, Any]
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = client.send("POST", CHAT, body)
    return connection, client.reply(connection, CHAT)


def cancel_early(client: Client, content: list[dict[str, Any]]) -> Cut:
    """Sends a request and hangs up before its first token, if none has come by then.

    Raises Unreachable.
    """
    body = client.body(content, MAX_TOKENS) | {"stream": True}
    connection = client.send("POST", CHAT, body)
    events, head = _Events(), b""
    try:
        time.sleep(EARLY)
        connection.sock.setblocking(False)
        while data := connection.sock.recv(65536):
            head = head or data
            events.feed(data)
        events.close()
    except (BlockingIOError, ssl.SSLWantReadError):
        pass  # no more has come yet
    except OSError as error:
        raise Unreachable(f"{client.url}{CHAT}: {error}") from error
    finally:
        connection.close()
    status = head.partition(b"\r\n")[0].decode(errors="replace")
    if status and " 200" not in status:
        events.error = status
    return Cut(events.pieces, events.ended, events.error)
