"""A client for OpenAI-compatible chat servers: standard library only, no retries, no guesses."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from vision_exp.validate.reply import Answer, BadReply, answer_of, names_of, parsed
from vision_exp.validate.wire import Wire

CHAT = "/chat/completions"
#: DeepSeek-V4's rendering in vLLM thinks if either is true, also as a default of the server.
NO_THINKING: dict[str, Any] = {
    "chat_template_kwargs": {"thinking": False, "enable_thinking": False}
}
LOGPROBS: dict[str, Any] = {"logprobs": True, "top_logprobs": 20}
FEW_LOGPROBS: dict[str, Any] = {"logprobs": True, "top_logprobs": 5}
#: What is asked of every request, the best first: servers refuse fields that they do not know, and
#: more alternatives than they were started for.
FORMS: tuple[dict[str, Any], ...] = (
    NO_THINKING | LOGPROBS,
    NO_THINKING | FEW_LOGPROBS,
    LOGPROBS,
    FEW_LOGPROBS,
    NO_THINKING,
    {},
)
#: Statuses by which servers refuse a field of a request.
UNKNOWN_FIELD = (400, 422)
BUSY = 429


def start_of(body: str) -> str:
    """The start of a reply's body, on one line."""
    return " ".join(body.split())[:300]


class Refused(Exception):
    """Another status than 200: with where a redirect leads, and the start of the body."""

    def __init__(self, status: int, body: str, location: str = "") -> None:
        told = f" to {location[:300]}" if location else ""
        words = start_of(body)
        super().__init__(f"HTTP {status}{told}: {words}" if words else f"HTTP {status}{told}")
        self.status, self.location = status, location


class Busy(Exception):
    """HTTP 429: the server takes no more requests now, whatever they ask."""

    def __init__(self, url: str, body: str) -> None:
        super().__init__(f"{url} answers HTTP {BUSY}: {start_of(body)}")


class Unreachable(Exception):
    """No HTTP answer, or one that broke off."""


class TooLate(Unreachable):
    """No whole answer within the time that a request has."""


@dataclass
class Client:
    """``url`` is the base with ``/v1``; ``timeout`` is in seconds, for each request with its reply.

    ``form``: fields that go along with every request, one of `FORMS`.
    """

    url: str
    model: str = ""
    key: str = ""
    timeout: float = 120.0
    form: dict[str, Any] = field(default_factory=lambda: dict(LOGPROBS))

    def models(self) -> list[str]:
        """Names that the server serves. Raises Refused, Busy, Unreachable or BadReply."""
        return names_of(self._json("GET", "/models"), self.url + "/models")

    def ask(
        self,
        content: list[dict[str, Any]],
        *,
        max_tokens: int = 16,
        salt: str = "",
        before: list[dict[str, Any]] | None = None,
    ) -> Answer:
        """One greedy answer to one user message. ``salt`` goes along as vLLM's ``cache_salt``.

        Raises Refused, Busy, Unreachable or BadReply.
        """
        body = self.body(content, max_tokens, salt, before or [])
        return answer_of(self._json("POST", CHAT, body), self.url + CHAT)

    def body(
        self,
        content: list[dict[str, Any]],
        max_tokens: int,
        salt: str = "",
        before: list[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """A chat request, as the server wants it."""
        body: dict[str, Any] = self.form | {
            "model": self.model,
            "messages": [*(before or []), {"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        return body | ({"cache_salt": salt} if salt else {})

    def send(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> http.client.HTTPConnection:
        """A connection on which the request was sent; the reply is not waited for.

        Its socket is a `Wire`. Raises Unreachable.
        """
        deadline = time.monotonic() + self.timeout
        parts = urlsplit(self.url)
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        secure = parts.scheme == "https"
        host, port = parts.hostname or "", parts.port
        if port is None:  # else http.client looks for one in the host, and an IPv6 zone is none
            port = 443 if secure else 80
        connection: http.client.HTTPConnection
        if secure:
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(
                host, port, timeout=self.timeout, context=context
            )
        else:
            connection = http.client.HTTPConnection(host, port, timeout=self.timeout)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, parts.path.rstrip("/") + path, data, headers)
        except (OSError, http.client.HTTPException, UnicodeError) as error:  # a host's odd labels
            connection.close()
            raise self.lost(path, error) from error
        connection.sock = Wire(connection.sock, self.url + path, deadline, self.timeout)
        return connection

    def lost(self, path: str, error: Exception, words: str = "") -> Unreachable:
        """What to raise for an error of the connection; ``words`` come before it."""
        kind = TooLate if isinstance(error, TimeoutError) else Unreachable
        return kind(f"{self.url}{path}: {words}{str(error) or type(error).__name__}")

    def reply(self, connection: http.client.HTTPConnection, path: str) -> http.client.HTTPResponse:
        """The reply's head.

        Raises Refused, Busy, Unreachable or BadReply, with the connection closed.
        """
        try:
            response = connection.getresponse()
            if response.status == 200:
                return response
            words = response.read(2000).decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self.lost(path, error) from error
        except BadReply:
            connection.close()
            raise
        connection.close()
        if response.status == BUSY:
            raise Busy(self.url + path, words)
        raise Refused(response.status, words, response.headers.get("Location", ""))

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        connection = self.send(method, path, body)
        response = self.reply(connection, path)
        try:
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self.lost(path, error, "the answer broke off: ") from error
        finally:
            response.close()
            connection.close()
        return parsed(data, self.url + path)
