"""What servers reply, read without trust: odd replies are named, with the URL that sent them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from vision_exp.validate.text import shown

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


def parsed(data: bytes, url: str) -> Any:
    """JSON as it came. Raises BadReply."""
    try:
        return json.loads(data)
    except ValueError as error:
        raise BadReply(url, f"no JSON, but {data[:80]!r}") from error
    except RecursionError as error:
        raise BadReply(url, f"JSON nested too deeply: {data[:80]!r}") from error


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
    return Answer(
        text=_words(message, ("content",), url),
        prompt_tokens=_get(_get(reply, "usage", dict, url), "prompt_tokens", int, url),
        tokens=[_alternatives(entry, url) for entry in _listed(logprobs, "content", url)],
        reasoning=_words(message, REASONING, url),
    )


def _get(holder: Any, name: str, kind: type, url: str) -> Any:
    if not isinstance(holder, dict):
        raise BadReply(url, f"no object with {name!r}, but {shown(holder)}")
    found = holder.get(name)
    # To Python a bool is an int; as a count of tokens it says nothing.
    if not isinstance(found, kind) or isinstance(found, bool):
        told = f"but {shown(found)}" if name in holder else f"only {shown(sorted(holder), 200)}"
        raise BadReply(url, f"no {JSON_NAMES[kind]} {name!r}, {told}")
    return found


def _listed(holder: Any, name: str, url: str) -> list[Any]:
    """A list that may be null or missing, as may what it is in."""
    if holder is None or (isinstance(holder, dict) and holder.get(name) is None):
        return []
    return list(_get(holder, name, list, url))


def _words(message: dict[str, Any], names: tuple[str, ...], url: str) -> str:
    """The first of the fields that is not null or missing."""
    for name in names:
        if message.get(name) is not None:
            return str(_get(message, name, str, url))
    return ""


def _alternatives(entry: Any, url: str) -> dict[str, float]:
    """Several tokens can have one spelling (halves of a character): the likeliest counts."""
    found: dict[str, float] = {}
    others = _listed(entry, "top_logprobs", url)
    for each in [entry, *others]:
        token = _get(each, "token", str, url)
        chance = _finite(each.get("logprob"))
        if chance is None:
            raise BadReply(url, f"the log-probability of {token!r} is {shown(each.get('logprob'))}")
        found[token] = max(chance, found.get(token, chance))
    return found


def _finite(value: Any) -> float | None:
    """A number as a float; None for what is none, or none that can be reckoned with."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return number if math.isfinite(number) else None
