"""A client for OpenAI-compatible chat servers: no retries, no redirects, no proxies, no guesses.

Replies are read without trust: what is malformed is named, with the URL that sent it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import anyio
import anyio.to_thread
import httpx
from pydantic import AliasPath, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

Json = dict[str, Any]
Bytes = AsyncIterator[bytes]
#: What a user message is made of: texts, and content parts with images.
Content = Sequence["str | Json"]
MODELS, CHAT = "/models", "/chat/completions"
#: Bytes of a reply: a hundred times what the longest answer asked for here takes.
LARGEST_REPLY = 16 << 20
LOGPROBS: Json = {"logprobs": True, "top_logprobs": 20}
#: HTTP status: the server takes no more requests now, whatever they ask.
BUSY = 429

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


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)  # a bool is an int to Python, and no count of tokens


class _Token(_Strict):
    token: str
    logprob: FiniteFloat
    top_logprobs: list[_Token] | None = None


class _Logprobs(_Strict):
    content: list[_Token] | None = None


class _Message(_Strict):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # what vLLM called it before


class Models(_Strict):
    """The reply to ``/models``, as far as it is of use here."""

    first: str = Field(validation_alias=AliasPath("data", 0, "id"))


class Chat(_Strict):
    """The reply to ``/chat/completions``."""

    message: _Message = Field(validation_alias=AliasPath("choices", 0, "message"))
    logprobs: _Logprobs | None = Field(None, validation_alias=AliasPath("choices", 0, "logprobs"))
    prompt_tokens: int = Field(validation_alias=AliasPath("usage", "prompt_tokens"))

    def answer(self) -> Answer:
        """Several tokens can have one spelling (halves of a character): the likeliest counts."""
        tokens = []
        for chosen in (self.logprobs and self.logprobs.content) or []:
            found: dict[str, float] = {}
            for each in (chosen, *(chosen.top_logprobs or ())):
                found[each.token] = max(each.logprob, found.get(each.token, each.logprob))
            tokens.append(found)
        reasoning = self.message.reasoning or self.message.reasoning_content or ""
        return Answer(self.message.content or "", self.prompt_tokens, tokens, reasoning)


Kind = TypeVar("Kind", bound=_Strict)


def parse(kind: type[Kind], data: bytes, url: str) -> Kind:
    """A reply that ``url`` sent. Raises BadReply."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        fault = f"{place}: {first['msg']}, got {first['input']!r:.80}".removeprefix(": ")
        raise BadReply(f"{url} sent a malformed reply: {fault}") from error


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
        return (await self._read(Models, MODELS)).first

    async def ask(self, content: Content, **options: Any) -> Answer:
        """One greedy answer; ``options`` are those of `body`."""
        return (await self._read(Chat, CHAT, self.body(content, **options))).answer()

    def body(self, content: Content, max_tokens: int = 16, **fields: Any) -> Json:
        """A request of one user message; ``fields`` go beside it, or in its place."""
        parts = [{"type": "text", "text": p} if isinstance(p, str) else p for p in content]
        messages = [{"role": "user", "content": parts}]
        body = {"model": self.model, "messages": messages, "max_tokens": max_tokens}
        return self.fields | body | {"temperature": 0} | fields

    @contextlib.asynccontextmanager
    async def reply(self, path: str, body: Json | None, **extensions: Any) -> AsyncIterator[Bytes]:
        """The bytes of a reply as they come, to hang up on; ``extensions`` are httpx's.

        The time is for the caller to bound.
        """
        asyncio.get_running_loop().getaddrinfo = _look_up  # type: ignore[method-assign]
        url, broke = self.url + path, ""
        sent: Json = {"json": body, "extensions": extensions}
        sent["headers"] = {"Accept-Encoding": "identity"}  # what is counted is what comes
        sent["headers"] |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            async with (
                httpx.AsyncClient(timeout=None, trust_env=False, verify=_certificates()) as http,
                http.stream("POST" if body else "GET", url, **sent) as response,
            ):
                pieces = _bounded(response, url)
                if response.status_code != 200:
                    start = b"".join([data async for data in pieces])[:2000]
                    words = " ".join(start.decode(errors="replace").split())[:300]
                    target = response.headers.get("Location", "")
                    raise Refused(url, response.status_code, words, target)
                broke = "the reply broke off: "
                yield pieces
        # A host's impossible labels show when its name is looked up.
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            root: BaseException = error
            while inner := root.__cause__ or root.__context__:  # what wraps it says less
                root = inner
            raise ServerError(f"{url}: {broke}{str(root) or type(root).__name__}") from error

    async def _read(self, kind: type[Kind], path: str, body: Any = None) -> Kind:
        url = self.url + path
        with anyio.move_on_after(self.timeout):
            async with self.reply(path, body) as pieces:
                return parse(kind, b"".join([data async for data in pieces]), url)
        raise TooLate(f"{url}: no whole reply within {self.timeout:g} s (--timeout)")


async def _bounded(response: httpx.Response, url: str) -> Bytes:
    async for data in response.aiter_raw():
        if response.num_bytes_downloaded > LARGEST_REPLY:
            raise BadReply(f"{url} sent a malformed reply: more than {LARGEST_REPLY} bytes")
        yield data


async def _look_up(*arguments: Any, **options: Any) -> Any:
    """The loop's `getaddrinfo`, by a thread that is not waited for once the time is over."""
    look = functools.partial(socket.getaddrinfo, *arguments, **options)
    return await anyio.to_thread.run_sync(look, abandon_on_cancel=True)
