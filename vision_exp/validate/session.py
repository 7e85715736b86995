"""What has to be known of a server before its answers can be judged."""

from __future__ import annotations

import dataclasses
import uuid
from typing import Any

from vision_exp.validate import images, judge
from vision_exp.validate.client import BUSY, LOGPROBS, Answer, Client, Content, Refused, ServerError
from vision_exp.validate.command import say

NAME_COLOUR = "What colour is the disc? Answer with one word."
#: Answers to a request alone, and to the same request with another image.
REPEATS, CONTROLS = 3, 2
#: DeepSeek-V4's rendering in vLLM thinks if either is true, also as a default of the server.
QUIET: dict[str, Any] = {"chat_template_kwargs": {"thinking": False, "enable_thinking": False}}
FEW = LOGPROBS | {"top_logprobs": 5}
#: What goes along with every request, the best first: servers refuse fields that they do not know,
#: and more alternatives than they were started for.
FIELDS = (QUIET | LOGPROBS, QUIET | FEW, LOGPROBS, FEW, QUIET, dict[str, Any]())
#: Statuses by which they do, and those that are about the caller, not about an image.
UNKNOWN_FIELD, CALLER = (400, 422), (401, 403, 404, BUSY)
#: Text questions that any trained chat model answers; they decide whether content can be judged.
SENSE = {
    "What is 2 + 3? Answer with one digit.": "5",
    "What is the capital of France? Answer with one word.": "paris",
}


class NoImages(ServerError):
    """The server answered text, and refused the same with an image."""


@dataclasses.dataclass(frozen=True)
class Session:
    """A server, and what was found out about it.

    ``incoherent_reason``: why the content of its answers cannot be judged, ``warm_reason``: why no
    answer is known to be cold; empty where they do not hold. ``noise``: of answers to one request.
    """

    client: Client
    incoherent_reason: str = ""
    warm_reason: str = ""
    noise: judge.Noise = judge.Noise()

    async def ask(self, *content: str | images.Part, **options: Any) -> Answer:
        return await self.client.ask(content, **options)

    async def cold(self, *content: str | images.Part) -> Answer:
        """Past vLLM's prefix cache, where the server takes a ``cache_salt``."""
        salt = {} if self.warm_reason else {"cache_salt": uuid.uuid4().hex}
        return await self.ask(*content, **salt)

    async def repeat(self, content: Content, times: int = REPEATS) -> list[Answer]:
        return [await self.cold(*content) for _ in range(times)]

    async def reference(self, content: Content, other: Content) -> judge.Reference:
        """What ``content`` is answered alone; ``other`` is the same with another image."""
        return judge.Reference(await self.repeat(content), await self.repeat(other, CONTROLS))

    async def attempt(self, *content: str | images.Part, **options: Any) -> Answer | Refused:
        """One token, or the refusal of what was asked: not that the server is busy."""
        try:
            return await self.ask(*content, max_tokens=1, **options)
        except Refused as error:
            if error.status == BUSY:
                raise
            return error

    def compare(
        self, pairs: list[judge.Pair], what: str, detail: str = "", also: judge.Good = True
    ) -> judge.Verdict:
        """Passed only if every answer is its reference's and ``also`` is true."""
        good, note = judge.all_same(pairs, self.noise)
        how = "alone or cold: asked with a fresh cache_salt, which vLLM honours"
        how = "without cache_salt, any may be from the server's cache" if self.warm_reason else how
        detail = f"{detail}; {note}".removeprefix("; ")
        return judge.Verdict(judge.both(good, also), f"{what} ({how})", detail)


def shows(colour: str, seed: int, question: str = NAME_COLOUR) -> Content:
    """An image of one colour's disc, and a question."""
    return [images.part(images.disc(colour, seed)), question]


async def explore(client: Client) -> Session:
    """Asks for the model's name, accepted fields, sense and noise. Raises ServerError."""
    client = dataclasses.replace(client, model=client.model or await client.first_model())
    for fields in FIELDS:
        client = dataclasses.replace(client, fields=fields)
        try:
            await client.ask(["Hello"], max_tokens=1)
            break
        except Refused as error:
            if error.status not in UNKNOWN_FIELD or fields is FIELDS[-1]:
                raise
    answers = {q: await client.ask([q], max_tokens=16) for q in SENSE}
    salted = await Session(client).attempt("Hello", cache_salt="vision-exp")
    warm = "the server takes no cache_salt, so no answer is known to be cold"
    warm, incoherent = warm if isinstance(salted, Refused) else "", ""
    say(f"model {client.model} at {client.url}")
    if not all(SENSE[question] in answer.text.lower() for question, answer in answers.items()):
        incoherent = "the model does not answer sense"
        if any(answer.reasoning and not answer.text for answer in answers.values()):
            asked = "although it was" if QUIET.items() <= client.fields.items() else "and cannot be"
            most = "reasoning and no content within 16 tokens"
            incoherent = f"the server gives {most}, {asked} asked not to think"
        texts = {question: answer.text or answer.reasoning for question, answer in answers.items()}
        say(f"As {incoherent} ({texts}), checks of content will be skipped.")
    session, noise = Session(client, incoherent, warm), judge.Noise()
    try:
        for index, colour in enumerate(images.COLOURS[:3]):
            noise += judge.noise_of(await session.repeat(shows(colour, 200 + index), times=4))
    except Refused as error:
        if error.status in CALLER:
            raise
        does = "fails at an" if error.status >= 500 else "takes no"
        words = f"{client.url}: the model {client.model} answers text but {does} image"
        raise NoImages(f"{words}: {error.reply}", error.status) from error
    if noise.incomparable or noise.limit > judge.FLOOR:
        say(
            f"Asked again alone, its answers move by {noise.moved:.2f} nats, or cannot be compared "
            f"({noise.incomparable} of {noise.repeats}): it is not reproducible. Answers further "
            f"away than {noise.limit:.2f} nats count as others, and where answers to another image "
            "are not, nothing is judged."
        )
    return dataclasses.replace(session, noise=noise)
