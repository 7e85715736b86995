"""A client for OpenAI-compatible chat servers: no retries, no redirects, no proxies, no guesses."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.to_thread
import httpx

from vision_exp.validate.reply import Answer, BadReply, Chat, Models, ServerError, parse

#: What a user message is made of: texts, and content parts with images.
Content = Sequence["str | dict[str, Any]"]
MODELS, CHAT = "/models", "/chat/completions"
#: Bytes of a reply: a hundred times what the longest answer asked for here takes.
LARGEST_REPLY = 16 << 20
LOGPROBS: dict[str, Any] = {"logprobs": True, "top_logprobs": 20}
#: HTTP status: the server takes no more requests now, whatever they ask.
BUSY = 429

_certificates = functools.cache(ssl.create_default_context)


class Refused(ServerError):
    """Another status than 200. ``target``: where a redirect leads; ``reply``: all that came."""

    def __init__(self, url: str, status: int, body: str = "", target: str = "") -> None:
        to = f" to {target[:300]}" if target else ""
        self.target, self.reply = target, f"HTTP {status}{to}: {body}".removesuffix(": ")
        super().__init__(f"{url} answers {self.reply}", status)


class TooLate(ServerError):
    """No whole answer within the time that a request has."""


@dataclass(frozen=True)
class Client:
    """``url`` is the base with ``/v1``; ``timeout``: seconds for each request with its reply.

    ``fields`` go along with every request. What is asked raises ServerError.
    """

    url: str
    model: str = ""
    key: str = ""
    timeout: float = 120.0
    fields: dict[str, Any] = field(default_factory=LOGPROBS.copy)

    async def first_model(self) -> str:
        """The name of the first model that the server lists."""
        return parse(Models, await self._read(MODELS, None), self.url + MODELS).first

    async def ask(self, content: Content, **options: Any) -> Answer:
        """One greedy answer; ``options`` are those of `body`."""
        data = await self._read(CHAT, self.body(content, **options))
        return parse(Chat, data, self.url + CHAT).answer()

    def body(
        self, content: Content, max_tokens: int = 16, before: Sequence[Any] = (), **fields: Any
    ) -> dict[str, Any]:
        """A request of one user message; ``before`` it others, ``fields`` beside them."""
        parts = [{"type": "text", "text": p} if isinstance(p, str) else p for p in content]
        messages = [*before, {"role": "user", "content": parts}]
        body = {"model": self.model, "messages": messages, "max_tokens": max_tokens}
        return self.fields | body | {"temperature": 0} | fields

    @contextlib.asynccontextmanager
    async def reply(
        self, path: str, body: dict[str, Any] | None, **extensions: Any
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The bytes of a reply as they come; it is hung up on where they are left.

        ``extensions`` are httpx's. The time is for the caller to bound.
        """
        asyncio.get_running_loop().getaddrinfo = _look_up  # type: ignore[method-assign]
        url, method, broke = self.url + path, "POST" if body else "GET", ""
        headers = {"Accept-Encoding": "identity"}  # what is counted is what comes
        headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        sent: dict[str, Any] = {"json": body, "headers": headers, "extensions": extensions}
        try:
            async with (
                httpx.AsyncClient(timeout=None, trust_env=False, verify=_certificates()) as http,
                http.stream(method, url, **sent) as response,
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

    async def _read(self, path: str, body: dict[str, Any] | None) -> bytes:
        with anyio.move_on_after(self.timeout):
            async with self.reply(path, body) as pieces:
                return b"".join([data async for data in pieces])
        late = f"no whole reply within {self.timeout:g} s (--timeout)"
        raise TooLate(f"{self.url}{path}: {late}")


async def _bounded(response: httpx.Response, url: str) -> AsyncIterator[bytes]:
    async for data in response.aiter_raw():
        if response.num_bytes_downloaded > LARGEST_REPLY:
            raise BadReply(url, f"more than {LARGEST_REPLY} bytes")
        yield data


async def _look_up(*arguments: Any, **options: Any) -> Any:
    """The loop's `getaddrinfo`, by a thread that is not waited for once the time is over."""
    look = functools.partial(socket.getaddrinfo, *arguments, **options)
    return await anyio.to_thread.run_sync(look, abandon_on_cancel=True)
