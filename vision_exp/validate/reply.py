"""What servers reply, read without trust: what is malformed is named, with the URL that sent it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from pydantic import AliasPath, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError


class ServerError(Exception):
    """What a server did in place of answering; ``status``: the one it gave, 0 for none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class BadReply(ServerError):
    """An HTTP 200 that is not what OpenAI's chat servers reply."""

    def __init__(self, url: str, fault: str) -> None:
        super().__init__(f"{url} sent a malformed reply: {fault}")


@dataclass(frozen=True)
class Answer:
    """``tokens``: one dict per generated token, text -> log-probability, the chosen one first.

    ``reasoning``: what a thinking model wrote before its text.
    """

    text: str
    prompt_tokens: int
    tokens: list[dict[str, float]] = field(default_factory=list)
    reasoning: str = ""
    status: ClassVar[int] = 200

    @property
    def texts(self) -> tuple[str, str]:
        """All that was generated, in words."""
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
        words = f"{place}: {first['msg']}".removeprefix(": ")
        raise BadReply(url, f"{words}, got {first['input']!r:.80}") from error
