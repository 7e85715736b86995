"""The API server's door for a vision checkpoint: what may be left out, and how long an error is.

Requests: OpenAI's API lets an `input_image` of the Responses API go without `detail`. The types
that most vLLM releases check it by do not, and answer with an error for each kind of item that it
could be, each with the whole image.

Errors: no answer repeats an image or is longer than a client can show.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

MOST_ERRORS = 8
_LONGEST_TEXT = 1500
#: Characters at each end of a text that are looked at: a body may hold an image a hundred times.
_SEARCHED = 8 * _LONGEST_TEXT
#: A character of base64 in a text, in a URL or, escaped once or more, in JSON or a repr.
_CODED = r"(?:[A-Za-z0-9+/_=-]|\\{1,4}(?:[/rnt]|u[0-9A-Fa-f]{4})|%[0-9A-Fa-f]{2})"
_WORD = rf"\s+{_CODED}{{16,}}"
_LAST = r"(?:\s+[A-Za-z0-9+/_-]*=+)?"
#: In a data URL, also one cut short; without a gap; in lines of any length, ten or more; in four or
#: more words that no prose has, three where they are long or are a list's items.
_BASE64 = re.compile(
    rf";(?i:base64),\s*{_CODED}+(?:{_WORD})*{_LAST}"
    rf"|{_CODED}{{100,}}|(?:{_CODED}+[ \t]*[\r\n]+[ \t]*){{9,}}{_CODED}+"
    rf"|{_CODED}{{16,}}(?:{_WORD}){{3,}}{_LAST}|{_CODED}{{48,}}(?:[\s'\",]+{_CODED}{{16,}}){{2,}}"
)


class Front:
    """An ASGI application around vLLM's, its handlers of errors included."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass a request on with what it may leave out, and its error shortened."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "POST" and scope["path"].rstrip("/").endswith("/v1/responses"):
            receive = _completed(receive)
        await self._app(scope, receive, _ShortErrors(send))


def stand_before(app: Any) -> None:
    """Put a Front around a FastAPI application, which has not served a request yet.

    Before its other parts too, which answer what no endpoint has caught. And let vLLM's handler of
    requests that are no valid ones see their errors shortened: it writes each with its input.
    """
    build = app.build_middleware_stack

    def build_all() -> Front:
        stock = app.exception_handlers.get(RequestValidationError)
        if stock is not None:

            async def answer(request: Any, error: RequestValidationError) -> Any:
                return await stock(request, RequestValidationError(short_errors(error.errors())))

            app.exception_handlers[RequestValidationError] = answer
        return Front(build())

    app.build_middleware_stack = build_all  # asked for once, at the first request


def _completed(receive: Receive) -> Receive:
    """The same request in one piece, with the `detail` of its images, once somebody asks for it.

    Not before: a client may have to be let in first.
    """
    asked = False

    async def receive_next() -> Message:
        nonlocal asked
        if asked:
            return await receive()
        asked = True
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return message  # the client has gone
            body += message.get("body", b"")
            if not message.get("more_body", False):
                return {**message, "body": with_detail(bytes(body))}

    return receive_next


def with_detail(body: bytes) -> bytes:
    """The body of a Responses request in which every `input_image` has a `detail`.

    The body itself if none lacks it, or if it is no JSON, which is vLLM's to answer.
    """
    if b"input_image" not in body:
        return body
    try:
        request = json.loads(body)
    except ValueError:
        return body
    items = request.get("input") if isinstance(request, dict) else None
    added = [_add_detail(part) for item in _list(items) for part in _parts(item)]
    return json.dumps(request).encode() if any(added) else body


def _parts(item: Any) -> list[Any]:
    """The content parts of an input item: of a message, or of what a tool gave back."""
    if not isinstance(item, dict):
        return []
    return [item, *_list(item.get("content")), *_list(item.get("output"))]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _add_detail(part: Any) -> bool:
    if not isinstance(part, dict) or part.get("type") != "input_image" or part.get("detail"):
        return False
    part["detail"] = "auto"
    return True


class _ShortErrors:
    """Sends what it gets; the body of an error is kept until it is whole, and shortened."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._body = bytearray()

    async def __call__(self, message: Message) -> None:
        """An ASGI `send`."""
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._start = message
            return
        if self._start is None or message["type"] != "http.response.body":
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        body = short_body(bytes(self._body))
        length = (b"content-length", str(len(body)).encode())
        others = [header for header in self._start["headers"] if header[0].lower() != length[0]]
        await self._send({**self._start, "headers": [*others, length]})
        await self._send({**message, "body": body})


def short_body(body: bytes) -> bytes:
    """The JSON of an error without images and long texts; itself if it has none of them."""
    try:
        answer = json.loads(body)
    except ValueError:
        return short(body.decode(errors="replace")).encode()
    shown = _map(answer)
    return body if shown == answer else json.dumps(shown, ensure_ascii=False).encode()


def short_errors(errors: Sequence[Any]) -> list[Any]:
    """Validation errors as pydantic lists them: not more than eight, long inputs abridged."""
    kept = [{**error, "input": _abridged(error.get("input"))} for error in errors[:MOST_ERRORS]]
    left = len(errors) - len(kept)
    return [*kept, {"type": "more", "msg": f"{left} more errors are left out"}] if left else kept


class _Brief(reprlib.Repr):
    """A repr that leaves out images before it cuts, which would leave both ends of them."""

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(short(x), level)


def _abridged(value: Any) -> Any:
    brief = _Brief()
    brief.maxstring = brief.maxother = 80
    brief.maxdict = brief.maxlist = 3
    told = brief.repr(value)
    return told if brief.fillvalue in told else value


def short(text: str) -> str:
    """The text without base64 and, if it is long, without its middle."""
    if len(text) > 2 * _SEARCHED:
        text = f"{text[:_SEARCHED]} ({len(text) - 2 * _SEARCHED} left out) {text[-_SEARCHED:]}"
    text = _BASE64.sub(lambda match: f"<{len(match[0])} characters of data>", text)
    if len(text) <= _LONGEST_TEXT:
        return text
    head, tail = _LONGEST_TEXT * 3 // 4, _LONGEST_TEXT // 4
    return f"{text[:head]} ... ({len(text) - head - tail} characters left out) ... {text[-tail:]}"


def _map(value: Any) -> Any:
    """JSON data with short strings and lists."""
    if isinstance(value, str):
        return short(value)
    if isinstance(value, dict):
        return {key: _map(item) for key, item in value.items()}
    return [_map(item) for item in value[:MOST_ERRORS]] if isinstance(value, list) else value
