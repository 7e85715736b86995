"""A client for OpenAI-compatible chat servers: no retries, no redirects, no proxies, no guesses.

Replies are read without trust: what is malformed is named, with the URL that sent it.
"""

import asyncio
import contextlib
import functools
import socket
import ssl
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import anyio.to_thread
import httpx
from pydantic import AliasPath, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from typing_extensions import Self

Json = dict[str, Any]
Bytes = AsyncIterator[bytes]
#: What a user message is made of: texts, and content parts (Json) with images.
Content = Sequence[Any]
MODELS, CHAT, COUNT = "/models", "/chat/completions", "/messages/count_tokens"
#: Bytes of a reply: a hundred times what the longest answer asked for here takes.
LARGEST_REPLY = 16 << 20
LOGPROBS: Json = {"logprobs": True, "top_logprobs": 20}
#: HTTP status: the server takes no more requests now, whatever they ask.
BUSY = 429
#: Seconds for which a stream is read after its first piece, so that one that was complete shows;
#: and after which a request is dropped that shall not have answered yet.
LISTEN, EARLY = 0.05, 0.02

_certificates = functools.cache(ssl.create_default_context)


class ServerError(Exception):
    """What a server did in place of answering; ``target``: where a redirect leads."""

    def __init__(self, message: str, status: int = 0, target: str = "") -> None:
        super().__init__(message)
        self.status, self.target = status, target


class BadReply(ServerError):
    """An HTTP 200 that is not what OpenAI's chat servers reply."""


class TooLate(ServerError):
    """No whole answer within the time that a request has."""


class Refused(ServerError):
    """Another status than 200; ``reply`` is all that came."""

    def __init__(self, url: str, status: int, body: str = "", target: str = "") -> None:
        to = f" to {target[:300]}" if target else ""
        self.reply = f"HTTP {status}{to}: {body}".removesuffix(": ")
        super().__init__(f"{url} answers {self.reply}", status, target)


@dataclass(frozen=True)
class Answer:
    """``tokens``: one dict per generated token, text -> log-probability, the chosen one first."""

    text: str
    prompt_tokens: int
    tokens: list[dict[str, float]] = field(default_factory=list)
    reasoning: str = ""
    status: ClassVar[int] = 200

    @property
    def texts(self) -> tuple[str, str]:
        return self.reasoning, self.text


class _Reply(BaseModel):
    model_config = ConfigDict(strict=True)  # a bool is an int to Python, and no count of tokens

    @classmethod
    def read(cls, data: bytes, url: str) -> Self:
        """What ``url`` sent. Raises BadReply."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            fault = f"{place}: {first['msg']}, got {first['input']!r:.80}".removeprefix(": ")
            raise BadReply(f"{url} sent a malformed reply: {fault}") from error


class _Token(_Reply):
    token: str
    logprob: FiniteFloat
    top_logprobs: "list[_Token] | None" = None


class _Logprobs(_Reply):
    content: list[_Token] | None = None


class _Message(_Reply):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # what vLLM called it before


class _Models(_Reply):
    first: str = Field(validation_alias=AliasPath("data", 0, "id"))


class Chat(_Reply):
    message: _Message = Field(validation_alias=AliasPath("choices", 0, "message"))
    logprobs: _Logprobs | None = Field(None, validation_alias=AliasPath("choices", 0, "logprobs"))
    prompt_tokens: int = Field(validation_alias=AliasPath("usage", "prompt_tokens"))

    def answer(self) -> Answer:
        """Several tokens can have one spelling (halves of a character): the likeliest counts."""
        tokens = []
        for chosen in (self.logprobs and self.logprobs.content) or []:
            listed = sorted([chosen, *(chosen.top_logprobs or ())], key=lambda each: each.logprob)
            tokens.append({chosen.token: 0.0} | {each.token: each.logprob for each in listed})
        reasoning = self.message.reasoning or self.message.reasoning_content or ""
        return Answer(self.message.content or "", self.prompt_tokens, tokens, reasoning)


class _Event(_Reply):
    error: Any = None
    delta: _Message | None = Field(None, validation_alias=AliasPath("choices", 0, "delta"))
    logprobs: Any = Field(None, validation_alias=AliasPath("choices", 0, "logprobs"))
    finish_reason: Any = Field(None, validation_alias=AliasPath("choices", 0, "finish_reason"))


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
            event = _Event.model_validate_json(data)
        except ValidationError:  # also where it is nested too deeply
            self.error = f"an event was no JSON that can be read: {data[:60]!r}"
            return
        self.error = f"{event.error!r:.200}" if event.error else ""
        # The first has the role alone. A token may have no text, but it has its log-probability.
        self.pieces += any((event.logprobs, *vars(event.delta or _Message()).values()))
        if event.finish_reason:
            self.ended = f"the answer had ended ({event.finish_reason!r:.80})"


@dataclass(frozen=True)
class Client:
    """``url`` is the base with ``/v1``; ``timeout``: seconds for each request with its reply.

    ``fields`` go along with every request. What is asked raises ServerError.
    """

    url: str
    model: str = ""
    key: str = ""
    timeout: float = 120.0
    fields: Json = field(default_factory=LOGPROBS.copy)

    async def first_model(self) -> str:
        """The name of the first model that the server lists."""
        return _Models.read(*await self.fetch(MODELS)).first

    async def ask(self, content: Content, **options: Any) -> Answer:
        """One greedy answer; ``options`` are those of `body`."""
        return Chat.read(*await self.fetch(CHAT, self.body(content, **options))).answer()

    def body(self, content: Content, max_tokens: int = 16, **fields: Any) -> Json:
        """A request of one user message; ``fields`` go beside it, or in its place."""
        parts = [{"type": "text", "text": p} if isinstance(p, str) else p for p in content]
        messages = [{"role": "user", "content": parts}]
        body = {"model": self.model, "messages": messages, "max_tokens": max_tokens}
        return self.fields | body | {"temperature": 0} | fields

    async def cancel(self, content: Content, read: float | None = None, **fields: Any) -> Cut:
        """Hangs up on a long answer after its first piece, or ``read`` seconds without a byte."""
        body = self.body(content, max_tokens=400, stream=True, **fields)
        cut, events = Cut(), 0
        with anyio.move_on_after(self.timeout) as scope, contextlib.suppress(httpx.ReadTimeout):
            async with self._reply(CHAT, body, read) as pieces:
                async for line in _lines(pieces):
                    if line.startswith(b"data:"):
                        events += 1
                        cut.read(line[5:].strip())
                    if cut.ended or cut.error:
                        return cut
                    if cut.pieces:
                        scope.deadline = min(scope.deadline, anyio.current_time() + LISTEN)
            cut.ended = "" if events else f"the reply was no stream of events but {line[:60]!r}"
            cut.error = f"cut off after {cut.pieces} pieces, without an end" if events else ""
        if scope.cancelled_caught and not cut.pieces:
            late = f"no piece of a streamed answer within {self.timeout:g} s (--timeout)"
            raise TooLate(f"{self.url}{CHAT}: {late}")
        return cut

    async def cancel_early(self, content: Content) -> Cut:
        """Hangs up before the first piece, if none comes soon; a refusal is the stream's error."""
        try:
            return await self.cancel(content, EARLY)
        except (BadReply, Refused) as error:
            return Cut(error=str(error))

    async def fetch(self, path: str, body: Json | None = None) -> tuple[bytes, str]:
        """A whole reply, and the URL that sent it."""
        url = self.url + path
        with anyio.move_on_after(self.timeout):
            async with self._reply(path, body) as pieces:
                return b"".join([data async for data in pieces]), url
        raise TooLate(f"{url}: no whole reply within {self.timeout:g} s (--timeout)")

    @contextlib.asynccontextmanager
    async def _reply(
        self, path: str, body: Json | None, read: float | None = None
    ) -> AsyncIterator[Bytes]:
        """The bytes as they come, at least one in ``read`` seconds; the caller bounds the time."""
        asyncio.get_running_loop().getaddrinfo = _look_up  # type: ignore[method-assign]
        url, broke, limit = self.url + path, "", httpx.Timeout(None, read=read)
        headers = {"Accept-Encoding": "identity"}  # what is counted is what comes
        headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            async with (
                httpx.AsyncClient(timeout=limit, trust_env=False, verify=_certificates()) as http,
                http.stream("POST" if body else "GET", url, json=body, headers=headers) as response,
            ):
                pieces = _bounded(response, url)
                if response.status_code != 200:
                    start = b"".join([data async for data in pieces])[:2000]
                    words = " ".join(start.decode(errors="replace").split())[:300]
                    target = response.headers.get("Location", "")
                    raise Refused(url, response.status_code, words, target)
                broke = "the reply broke off: "
                yield pieces
        except httpx.ReadTimeout:
            raise
        # A host's impossible labels show when its name is looked up.
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            root: BaseException = error
            while inner := root.__cause__ or root.__context__:  # what wraps it says less
                root = inner
            raise ServerError(f"{url}: {broke}{str(root) or type(root).__name__}") from error


async def at_once(calls: list[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """The calls' results in their order. Raises the first's error once all have ended."""
    found = await asyncio.gather(*calls, return_exceptions=True)
    for error in (each for each in found if isinstance(each, BaseException)):
        raise error
    return [each for each in found if isinstance(each, Answer)]


async def _bounded(response: httpx.Response, url: str) -> Bytes:
    async for data in response.aiter_raw():
        if response.num_bytes_downloaded > LARGEST_REPLY:
            raise BadReply(f"{url} sent a malformed reply: more than {LARGEST_REPLY} bytes")
        yield data


async def _lines(pieces: Bytes) -> Bytes:
    """Lines, however they are cut up; the last may have no end."""
    rest = b""
    async for data in pieces:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
    yield rest


async def _look_up(*arguments: Any, **options: Any) -> Any:
    """The loop's `getaddrinfo`, by a thread that is not waited for once the time is over."""
    look = functools.partial(socket.getaddrinfo, *arguments, **options)
    return await anyio.to_thread.run_sync(look, abandon_on_cancel=True)
