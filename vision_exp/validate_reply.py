"""What servers reply, read without trust: odd replies are named, with the URL that sent them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

#: Fields for what a thinking model says first: vLLM's now, and what it was called before.
REASONING = ("reasoning", "reasoning_content")


JSON_NAMES = {dict: "object", list: "array", str: "string", int: "number"}


class BadReply(Exception):
    """An HTTP 200 that is not what OpenAI's chat servers reply."""

    def __init__(self, url: str, odd: str) -> None:
        super().__init__(f"{url} replied oddly: {odd}")


@dataclass(frozen=True)
class Answer:
    """Text, prompt length in tokens, tokens with their alternatives where the server gives them.

    ``tokens``: one dict per generated token, token text -> log-probability, the chosen one first.
    ``reasoning``: what a thinking model said before its text.
    """

    text: str
    prompt_tokens: int
    tokens: list[dict[str, float]] = field(default_factory=list)
    reasoning: str = ""

    @property
    def said(self) -> tuple[str, str]:
        """All that was generated, in words."""
        return self.reasoning, self.text

    @property
    def empty(self) -> bool:
        """Nothing in it that another answer could differ from."""
        return not (self.text or self.reasoning or self.tokens)


def names_of(reply: Any, url: str) -> list[str]:
    """The names of ``/models``. Raises BadReply."""
    entries = _get(reply, "data", list, url)
    names = [entry.get("id") for entry in entries if isinstance(entry, dict)]
    found = [name for name in names if isinstance(name, str)]
    if not found:
        raise BadReply(url, "it names no model")
    return found


def answer_of(reply: Any, url: str) -> Answer:
    """The first choice of a chat reply. Raises BadReply."""
    choices = _get(reply, "choices", list, url)
    if not choices:
        raise BadReply(url, "'choices' is empty")
    message = _get(choices[0], "message", dict, url)
    logprobs = choices[0].get("logprobs")
    listed = logprobs.get("content") if isinstance(logprobs, dict) else None
    return Answer(
        text=_words(message, ("content",), url),
        prompt_tokens=_get(_get(reply, "usage", dict, url), "prompt_tokens", int, url),
        tokens=[_alternatives(entry, url) for entry in listed or []],
        reasoning=_words(message, REASONING, url),
    )


def _get(holder: Any, name: str, kind: type, url: str) -> Any:
    if not isinstance(holder, dict):
        raise BadReply(url, f"no object with {name!r}, but {str(holder)[:80]!r}")
    if not isinstance(holder.get(name), kind):
        told = f"but {holder[name]!r:.80}" if name in holder else f"only {sorted(map(str, holder))}"
        raise BadReply(url, f"no {JSON_NAMES[kind]} {name!r}, {told}")
    return holder[name]


def _words(message: dict[str, Any], names: tuple[str, ...], url: str) -> str:
    """The first of the fields that is not null or missing."""
    for name in names:
        if message.get(name) is not None:
            return str(_get(message, name, str, url))
    return ""


def _alternatives(entry: Any, url: str) -> dict[str, float]:
    """Several tokens can have one spelling (halves of a character): the likeliest counts."""
    found: dict[str, float] = {}
    others = entry.get("top_logprobs") if isinstance(entry, dict) else None
    for each in [entry, *(others or [])]:
        token, chance = _get(each, "token", str, url), each.get("logprob")
        if not isinstance(chance, (int, float)) or not math.isfinite(chance):
            raise BadReply(url, f"the log-probability of {token!r} is {chance!r}")
        found[token] = max(chance, found.get(token, chance))
    return found
