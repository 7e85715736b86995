"""What is found out of a server first, and how all checks are run."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from vision_exp.validate.checks import CHECKS, COLOURS, Check, Session, shows
from vision_exp.validate.client import LOGPROBS, Busy, Client, Refused, ServerError
from vision_exp.validate.hints import WHO, NoImages, no_server
from vision_exp.validate.judge import FLOOR, Noise, Verdict, noise_of
from vision_exp.validate.output import say
from vision_exp.validate.reply import Answer, BadReply
from vision_exp.validate.stream import UNKNOWN_FIELD
from vision_exp.validate.usage import Options

#: DeepSeek-V4's rendering in vLLM thinks if either is true, also as a default of the server.
NO_THINKING: dict[str, Any] = {
    "chat_template_kwargs": {"thinking": False, "enable_thinking": False}
}
FEW = LOGPROBS | {"top_logprobs": 5}
#: What goes along with every request, the best first: servers refuse fields that they do not know,
#: and more alternatives than they were started for.
FIELDS: tuple[dict[str, Any], ...] = (
    NO_THINKING | LOGPROBS,
    NO_THINKING | FEW,
    LOGPROBS,
    FEW,
    NO_THINKING,
    {},
)
#: Text questions that any trained chat model answers; they decide whether content can be judged.
SENSE = {
    "What is 2 + 3? Answer with one digit.": "5",
    "What is the capital of France? Answer with one word.": "paris",
}
SENSE_TOKENS = 16


async def everything(options: Options, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Runs all checks into ``results``; returns what is known of the server. Raises Stop."""
    client = Client(options.url, options.model, options.api_key, options.timeout)
    try:
        session = await explore(client)
    except ServerError as error:
        raise no_server(options, error) from error
    for check in CHECKS:
        results.append(await run(check, session))
    noise = session.noise
    return {
        "model": session.client.model,
        "trained": session.is_coherent,
        "noise_nats": None if noise.incomparable else noise.moved,
        "noise": {"moved": noise.moved, "lost": noise.incomparable, "repeats": noise.repeats},
    }


async def explore(client: Client) -> Session:
    """Finds the model's name, which fields the server takes, whether it answers sense, its noise.

    Raises ServerError.
    """
    client = dataclasses.replace(client, model=client.model or await client.first_model())
    client = await _with_fields(client, FIELDS)
    answers = {q: await client.ask([q], max_tokens=SENSE_TOKENS) for q in SENSE}
    is_coherent = all(SENSE[q] in answer.text.lower() for q, answer in answers.items())
    why = "" if is_coherent else _incoherent_reason(list(answers.values()), client.fields)
    warm = ""
    try:
        await client.ask(["Hello"], max_tokens=1, salt="vision-exp")
    except Refused:
        warm = "the server takes no cache_salt, so no answer is known to be cold"
    say(f"model {client.model} at {client.url}")
    if why:
        texts = {q: answer.text or answer.reasoning for q, answer in answers.items()}
        say(f"{why[0].upper()}{why[1:]} ({texts}): checks of content will be skipped.")
    session = Session(client, why, warm)
    noise = Noise()
    try:
        for index, colour in enumerate(list(COLOURS)[:3]):
            noise += noise_of(await session.repeat(shows(colour, 200 + index), 4))
    except Refused as error:
        if error.status in WHO:
            raise
        raise NoImages(client.url, client.model, error) from error
    if noise.incomparable or noise.limit > FLOOR:
        say(
            f"Asked again alone, its answers move by {noise}: it is not reproducible. Answers "
            f"further away than {noise.limit:.2f} nats count as others, and where answers to "
            "another image are not, nothing is judged."
        )
    return dataclasses.replace(session, noise=noise)


async def _with_fields(client: Client, forms: tuple[dict[str, Any], ...]) -> Client:
    """With the first that the server takes. Raises what it says to the last of them."""
    client = dataclasses.replace(client, fields=forms[0])
    try:
        await client.ask(["Hello"], max_tokens=1)
    except Refused as error:
        if error.status not in UNKNOWN_FIELD or not forms[1:]:
            raise
        return await _with_fields(client, forms[1:])
    return client


def _incoherent_reason(answers: list[Answer], fields: dict[str, Any]) -> str:
    """Why content is not judged, as far as answers to `SENSE` tell."""
    if any(answer.reasoning and not answer.text for answer in answers):
        asked = "and it does not take chat_template_kwargs, which would stop its thinking"
        if NO_THINKING.items() <= fields.items():
            asked = "although it was asked not to think"
        return f"the server gives reasoning and no content within {SENSE_TOKENS} tokens, {asked}"
    if not any(answer.text for answer in answers):
        return "the server's answers are empty"
    return "the model does not answer sense"


async def run(check: Check, session: Session) -> dict[str, Any]:
    """One check; what the server refuses, drops or malforms on the way is its failure.

    Not that it is busy: that says nothing about images.
    """
    started = time.monotonic()
    try:
        missing = check.missing(session)
        found = Verdict(None, "nothing", missing) if missing else await check.run(session)
    except Busy as error:
        found = Verdict(None, "nothing, a request of this check was not taken", str(error))
    except BadReply as error:
        found = Verdict(False, "the form of an answer", str(error))
    except ServerError as error:
        found = Verdict(False, "a request of this check against any answer", str(error))
    seconds = time.monotonic() - started
    say(f"{found.state:8} {check.name} ({seconds:.1f} s)")
    say(f"         compared: {found.compared}")
    say(f"         {'why' if found.good is None else 'found'}: {found.detail}")
    words = {"name": check.name, "state": found.state, "compared": found.compared}
    return words | {"detail": found.detail, "seconds": round(seconds, 2)}
