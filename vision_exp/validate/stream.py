"""Streamed answers that are hung up on, and what is known of them at that moment."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import anyio
from pydantic_core import from_json

from vision_exp.validate.client import CHAT, BadReply, Bytes, Client, Content, Refused, TooLate

#: Seconds for which an answer is read after its first piece: one that was complete by then shows.
LISTEN = 0.05
#: Seconds after which a request is dropped that shall not have answered yet.
EARLY = 0.02
#: Fields of a piece that may have text.
TEXTS = ("content", "reasoning", "reasoning_content")


@dataclass
class Cut:
    """A stream when it was hung up on: pieces of text so far, why it had ended, what was wrong."""

    pieces: int = 0
    ended: str = ""
    error: str = ""

    def read(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.ended = "the stream was complete"
            return
        try:
            event = from_json(data)
        except ValueError:  # also where it is nested too deeply
            self.error = f"an event was no JSON that can be read: {data[:60]!r}"
            return
        if error := _at(event, "error"):
            self.error = f"{error!r:.200}"
        choice = _at(event, "choices", 0)
        # The first has the role alone. A token may have no text, but it has its log-probability.
        texts = [_at(choice, "delta", name) for name in TEXTS]
        self.pieces += any((*texts, _at(choice, "logprobs")))
        if reason := _at(choice, "finish_reason"):
            self.ended = f"the answer had ended ({reason!r:.80})"


def _at(holder: Any, *keys: str | int) -> Any:
    """What is there; None where nothing is, or nothing that has parts."""
    try:
        return functools.reduce(operator.getitem, keys, holder)
    except (LookupError, TypeError):
        return None


async def cancel(client: Client, content: Content, early: bool = False, **fields: Any) -> Cut:
    """Hangs up on a long answer after its first piece, or before it. Raises ServerError."""
    body = client.body(content, max_tokens=400, stream=True, **fields)
    cut, events = Cut(), 0
    with anyio.move_on_after(client.timeout) as scope:
        whole = scope.deadline

        async def trace(event: str, _: Any) -> None:
            if early and event == "http11.send_request_body.complete":
                scope.deadline = anyio.current_time() + EARLY

        async with client.reply(CHAT, body, trace=trace) as pieces:
            async for line in _lines(pieces):
                if line.startswith(b"data:"):
                    events += 1
                    cut.read(line[5:].strip())
                if cut.ended or cut.error or (early and cut.pieces):
                    return cut
                if cut.pieces and scope.deadline == whole:
                    scope.deadline = anyio.current_time() + LISTEN
        cut.ended = "" if events else f"the reply was no stream of events but {line[:60]!r}"
        cut.error = f"cut off after {cut.pieces} pieces, without an end" if events else ""
    if scope.cancelled_caught and scope.deadline == whole:
        late = f"no piece of a streamed answer within {client.timeout:g} s (--timeout)"
        raise TooLate(f"{client.url}{CHAT}: {late}")
    return cut


async def _lines(pieces: Bytes) -> Bytes:
    """Lines, however they are cut up; the last may have no end."""
    rest = b""
    async for data in pieces:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
    yield rest


async def cancel_early(client: Client, content: Content) -> Cut:
    """As `cancel` does early; a refusal is the stream's error."""
    try:
        return await cancel(client, content, early=True)
    except (BadReply, Refused) as error:
        return Cut(error=str(error))
