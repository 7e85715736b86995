"""Streamed answers that are hung up on, and what is known of them at that moment."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from dataclasses import dataclass
from typing import Any, cast

from vision_exp.validate.client import CHAT, UNKNOWN_FIELD, Client, Refused
from vision_exp.validate.reply import REASONING
from vision_exp.validate.text import shown
from vision_exp.validate.wire import Wire

#: Seconds for which an answer is read after its first piece: one that was complete by then shows.
LISTEN = 0.05
#: Seconds after which a request is dropped that shall not have answered yet.
EARLY = 0.02
MAX_TOKENS = 400
#: Bytes of one line of a stream: an event is a token with its alternatives.
LONGEST = 1 << 20


@dataclass(frozen=True)
class Cut:
    """A stream at the moment of hanging up: pieces of text that had come, and why it had ended.

    ``ended`` is empty while it was running; ``error`` tells what was wrong with the stream.
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
            self._line(line)
        if len(self.rest) > LONGEST:
            self.error = f"a line of more than {LONGEST} bytes: {self.rest[:60]!r}"

    def close(self) -> None:
        """The server sent all it had."""
        self._line(self.rest)  # the last line may have no end
        if not self.seen:
            words = self.rest.strip()[:60].decode(errors="replace")
            self.ended = f"the reply was no stream of events but {words!r}"
        elif not self.ended:
            cut = f"cut off after {self.pieces} pieces, without finish_reason or [DONE]"
            self.error = self.error or cut

    def _line(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            self.seen = True
            self._event(line[5:].strip())

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.ended = self.ended or "the stream was complete"
            return
        try:
            event: Any = json.loads(data)
        except (ValueError, RecursionError):
            self.error = f"an event was no JSON that can be read: {data[:60]!r}"
            return
        if not isinstance(event, dict):
            return
        if event.get("error"):
            self.error = shown(event["error"], 200)
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
            self.ended = f"the answer had ended ({shown(choice['finish_reason'])})"


def cancel(client: Client, content: list[dict[str, Any]]) -> Cut:
    """Starts a long streamed answer and hangs up soon after its first piece.

    Raises Refused, Busy, Unreachable or BadReply.
    """
    body = client.body(content, MAX_TOKENS) | {"stream": True}
    try:
        # vLLM's; without it a model may have nothing more to say after a word.
        wire, response = _open(client, body | {"ignore_eos": True})
    except Refused as error:
        if error.status not in UNKNOWN_FIELD:
            raise
        wire, response = _open(client, body)
    events = _Events()
    try:
        _read(wire, response, events)
    except TimeoutError as error:
        words = f"no piece of a streamed answer within {client.timeout:g} s (--timeout)"
        raise client.lost(CHAT, TimeoutError(words)) from error
    except (OSError, http.client.HTTPException) as error:
        raise client.lost(CHAT, error, "the stream broke off: ") from error
    finally:
        response.close()
        wire.close()
    return Cut(events.pieces, events.ended, events.error)


def _read(wire: Wire, response: http.client.HTTPResponse, events: _Events) -> None:
    """Up to the first piece, and then on for as long as `LISTEN` tells."""
    heard = False
    while not (events.ended or events.error):
        if events.pieces and not heard:
            heard, wire.deadline = True, time.monotonic() + LISTEN
        try:
            data = response.read1(65536)
        except TimeoutError:
            if heard:
                return
            raise
        if not data:
            events.close()
            return
        events.feed(data)


def _open(client: Client, body: dict[str, Any]) -> tuple[Wire, http.client.HTTPResponse]:
    connection = client.send("POST", CHAT, body)
    wire = cast("Wire", connection.sock)  # forgotten there where the server will close
    return wire, client.reply(connection, CHAT)


def cancel_early(client: Client, content: list[dict[str, Any]]) -> Cut:
    """Sends a request and hangs up before its first token, if none has come by then.

    Raises Unreachable.
    """
    body = client.body(content, MAX_TOKENS) | {"stream": True}
    connection = client.send("POST", CHAT, body)
    sock = cast("Wire", connection.sock).sock
    events, head = _Events(), b""
    try:
        time.sleep(EARLY)
        sock.setblocking(False)
        limit = time.monotonic() + EARLY  # a server may send without end
        while time.monotonic() < limit and not (events.pieces or events.ended or events.error):
            data = sock.recv(65536)
            if not data:
                events.close()
                break
            head = head or data
            events.feed(data)
    except (BlockingIOError, ssl.SSLWantReadError):
        pass  # no more has come yet
    except OSError as error:
        raise client.lost(CHAT, error) from error
    finally:
        connection.close()
    status = head.partition(b"\r\n")[0].decode(errors="replace")
    if status and " 200" not in status:
        events.error = status
    return Cut(events.pieces, events.ended, events.error)
