"""Streamed answers that are hung up on, and what is known of them at that moment."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, field
from typing import Any

import anyio
from pydantic_core import from_json

from vision_exp.validate.client import CHAT, Busy, Client, Content, Refused, TooLate
from vision_exp.validate.reply import BadReply
from vision_exp.validate.session import UNKNOWN_FIELD

#: Seconds for which an answer is read after its first piece: one that was complete by then shows.
LISTEN = 0.05
#: Seconds after which a request is dropped that shall not have answered yet.
EARLY = 0.02
#: Fields of a piece that may have text.
TEXTS = ("content", "reasoning", "reasoning_content")


@dataclass
class Cut:
    """A stream at the moment of hanging up: pieces of text that had come, and why it had ended.

    ``ended`` is empty while it was running; ``error`` tells what was wrong with the stream;
    ``rest`` is the start of a line.
    """

    pieces: int = 0
    ended: str = ""
    error: str = ""
    rest: bytes = field(default=b"", compare=False)
    seen: bool = field(default=False, compare=False)

    def feed(self, data: bytes) -> None:
        """Reads server-sent events as they come in, however they are cut up."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self.seen = True
                self._read(line[5:].strip())

    def close(self) -> None:
        """The server sent all it had."""
        start = self.rest.strip()[:60]
        self.feed(b"\n")  # the last line may have no end
        if not self.seen:
            self.ended = f"the reply was no stream of events but {start!r}"
        elif not (self.ended or self.error):
            self.error = f"cut off after {self.pieces} pieces, without finish_reason or [DONE]"

    def _read(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.ended = self.ended or "the stream was complete"
            return
        try:
            event = from_json(data)
        except ValueError:  # also where it is nested too deeply
            self.error = f"an event was no JSON that can be read: {data[:60]!r}"
            return
        if _at(event, "error"):
            self.error = f"{event['error']!r:.200}"
        choice = _at(event, "choices", 0)
        # The first event has the role alone. A token may have no text, but it has its
        # log-probability.
        texts = [_at(choice, "delta", name) for name in TEXTS]
        self.pieces += any((*texts, _at(choice, "logprobs")))
        if _at(choice, "finish_reason"):
            self.ended = f"the answer had ended ({choice['finish_reason']!r:.80})"


def _at(holder: Any, *keys: str | int) -> Any:
    """What is there; None where nothing is, or nothing that has parts."""
    try:
        return functools.reduce(operator.getitem, keys, holder)
    except (LookupError, TypeError):
        return None


async def cancel(client: Client, content: Content) -> Cut:
    """Starts a long streamed answer and hangs up soon after its first piece. Raises ServerError."""
    try:
        # vLLM's; without it a model may have nothing more to say after a word.
        return await _hang_up(client, content, ignore_eos=True)
    except Refused as error:
        if error.status not in UNKNOWN_FIELD:
            raise
        return await _hang_up(client, content)


async def cancel_early(client: Client, content: Content) -> Cut:
    """Sends a request and hangs up before its first token, if none has come by then.

    A refusal is the stream's error. Raises Unreachable.
    """
    try:
        return await _hang_up(client, content, EARLY)
    except (BadReply, Busy, Refused) as error:
        return Cut(error=str(error))


async def _hang_up(client: Client, content: Content, early: float = 0, **fields: Any) -> Cut:
    body = client.body(content, max_tokens=400) | {"stream": True} | fields
    cut, bounded = Cut(), False
    with anyio.move_on_after(client.timeout) as scope:

        def within(seconds: float) -> None:
            nonlocal bounded
            if not bounded:
                bounded, scope.deadline = True, anyio.current_time() + seconds

        async def trace(event: str, _: Any) -> None:
            if early and event == "http11.send_request_body.complete":
                within(early)

        async with client.reply(CHAT, body, trace=trace) as pieces:
            async for data in pieces:
                cut.feed(data)
                if cut.ended or cut.error or (early and cut.pieces):
                    return cut
                if cut.pieces:
                    within(LISTEN)
            cut.close()
    if scope.cancelled_caught and not bounded:
        late = f"no piece of a streamed answer within {client.timeout:g} s (--timeout)"
        raise TooLate(f"{client.url}{CHAT}: {late}")
    return cut
