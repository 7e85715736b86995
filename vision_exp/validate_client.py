"""A client for OpenAI-compatible chat servers: standard library only, no retries, no guesses."""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


class Refused(Exception):
    """The server answered with an HTTP error: ``status`` and the start of its body."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body[:300]}")
        self.status = status


class Unreachable(Exception):
    """No HTTP answer at all."""


@dataclass(frozen=True)
class Answer:
    """Text, tokens with their alternatives where the server gives them, prompt length in tokens.

    ``tokens``: one dict per generated token, token text -> log-probability, the chosen one first.
    """

    text: str
    prompt_tokens: int
    tokens: list[dict[str, float]] = field(default_factory=list)


@dataclass
class Client:
    """``url`` is the base with ``/v1``. ``salt`` goes along as vLLM's ``cache_salt`` when given."""

    url: str
    model: str = ""
    key: str = ""
    timeout: float = 120.0

    def models(self) -> list[str]:
        """Names that the server serves. Raises Refused or Unreachable."""
        return [entry["id"] for entry in self._json("GET", "/models")["data"]]

    def ask(
        self,
        content: list[dict[str, Any]],
        *,
        max_tokens: int = 16,
        salt: str = "",
        before: list[dict[str, Any]] | None = None,
    ) -> Answer:
        """One greedy answer to one user message. Raises Refused or Unreachable."""
        body = self._body(content, max_tokens, salt, before or [])
        reply = self._json("POST", "/chat/completions", body)
        choice = reply["choices"][0]
        listed = (choice.get("logprobs") or {}).get("content") or []
        return Answer(
            text=choice["message"].get("content") or "",
            prompt_tokens=int(reply["usage"]["prompt_tokens"]),
            tokens=[_alternatives(entry) for entry in listed],
        )

    def cancel(self, content: list[dict[str, Any]], *, max_tokens: int = 400) -> int:
        """Starts a streamed answer, hangs up after its first piece; bytes read until then."""
        body = self._body(content, max_tokens, "", []) | {"stream": True}
        connection, response = self._open("POST", "/chat/completions", body)
        try:
            return len(response.read1(4096))
        finally:
            connection.close()

    def _body(
        self, content: list[dict[str, Any]], max_tokens: int, salt: str, before: list[Any]
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [*before, {"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 5,
        }
        if salt:
            body["cache_salt"] = salt
        return body

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        connection, response = self._open(method, path, body)
        try:
            return json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unreachable(f"{self.url}{path}: broken answer: {error}") from error
        finally:
            connection.close()

    def _open(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        parts = urlsplit(self.url)
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(
                parts.netloc, timeout=self.timeout, context=context
            )
        else:
            connection = http.client.HTTPConnection(parts.netloc, timeout=self.timeout)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, parts.path.rstrip("/") + path, data, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Unreachable(f"{self.url}{path}: {error}") from error
        if response.status != 200:
            words = response.read(2000).decode(errors="replace")
            connection.close()
            raise Refused(response.status, words)
        return connection, response


def _alternatives(entry: dict[str, Any]) -> dict[str, float]:
    chosen = {entry["token"]: float(entry["logprob"])}
    return chosen | {
        other["token"]: float(other["logprob"])
        for other in entry.get("top_logprobs") or []
        if other["token"] != entry["token"]
    }
