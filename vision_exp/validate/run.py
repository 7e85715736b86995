"""The validator's list of checks, what it finds out of a server first, and how a check is run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from vision_exp.validate import checks, taken
from vision_exp.validate import images as pictures
from vision_exp.validate.client import (
    FORMS,
    NO_THINKING,
    UNKNOWN_FIELD,
    Busy,
    Client,
    Refused,
    Unreachable,
)
from vision_exp.validate.hints import WHO, NoPicture, no_server
from vision_exp.validate.judge import FAILED, FLOOR, SKIPPED, Verdict, skipped
from vision_exp.validate.probe import coordinates
from vision_exp.validate.reply import Answer, BadReply
from vision_exp.validate.text import say
from vision_exp.validate.usage import Options

CHECKS: dict[str, Callable[[checks.Lab], Verdict]] = {
    "two concurrent image requests": checks.concurrent(2),
    "three concurrent image requests": checks.concurrent(3),
    "each request its own picture": checks.own_picture,
    "the same picture twice": checks.same_twice,
    "one picture at every offset": checks.offsets,
    "pictures in another order": checks.reordered,
    "a prefix fork": checks.prefix_fork,
    "a cancelled request": checks.cancelled,
    "a bad image, then a good one": checks.bad_then_good,
    "a picture in a system message": taken.system_image,
    "pictures of all shapes": taken.shapes,
    "formats and colour modes": taken.formats,
    "positions in a picture": coordinates,
}
#: Text questions that any trained chat model answers; they decide whether content can be judged.
SENSE = {
    "What is 2 + 3? Answer with one digit.": "5",
    "What is the capital of France? Answer with one word.": "paris",
}
SENSE_TOKENS = 16


def enter(options: Options) -> checks.Lab:
    """What has to be known of the server first. Raises Stop where it cannot be used."""
    client = Client(options.url, options.model, options.key, options.timeout)
    try:
        return explore(client)
    except (Unreachable, Refused, Busy, BadReply, NoPicture) as error:
        raise no_server(options, error) from error


def explore(client: Client) -> checks.Lab:
    """Finds the model's name, which fields the server takes, whether it answers sense, its noise.

    Raises Refused, Busy, Unreachable, BadReply or NoPicture.
    """
    client.model = client.model or client.models()[0]
    client.form = form_of(client)
    answers = {
        question: client.ask([pictures.words(question)], max_tokens=SENSE_TOKENS)
        for question in SENSE
    }
    trained = all(SENSE[question] in answer.text.lower() for question, answer in answers.items())
    why = "" if trained else senseless(list(answers.values()), client.form)
    try:
        client.ask([pictures.words("Hello")], max_tokens=1, salt="vision-exp")
        salts = True
    except Refused:
        salts = False
    say(f"model {client.model} at {client.url}")
    if not trained:
        told = {question: answer.text or answer.reasoning for question, answer in answers.items()}
        say(f"{why[0].upper()}{why[1:]} ({told}): checks of content will be skipped.")
    lab = checks.Lab(client, trained, salts, senseless=why)
    try:
        noise = checks.own_noise(lab)
    except Refused as error:
        if error.status in WHO:
            raise
        raise NoPicture(client.url, client.model, error) from error
    if noise.lost or noise.limit > FLOOR:
        say(
            f"Asked again alone, its answers move by {noise}: it is not reproducible. Answers "
            f"further away than {noise.limit:.2f} nats count as others, and where answers to "
            "another picture are not, nothing is judged."
        )
    return dataclasses.replace(lab, noise=noise)


def form_of(client: Client) -> dict[str, Any]:
    """The first of `FORMS` that the server takes. Raises what it says to the last of them."""
    for form in FORMS[:-1]:
        client.form = form
        try:
            client.ask([pictures.words("Hello")], max_tokens=1)
        except Refused as error:
            if error.status not in UNKNOWN_FIELD:
                raise
        else:
            return form
    client.form = FORMS[-1]
    client.ask([pictures.words("Hello")], max_tokens=1)
    return client.form


def senseless(answers: list[Answer], form: dict[str, Any]) -> str:
    """Why an untrained model's content is not judged, as far as its answers to `SENSE` tell."""
    if any(answer.reasoning and not answer.text for answer in answers):
        asked = (
            "although it was asked not to think"
            if NO_THINKING.items() <= form.items()
            else ("and it does not take chat_template_kwargs, which would stop its thinking")
        )
        return f"the server gives reasoning and no content within {SENSE_TOKENS} tokens, {asked}"
    if not any(answer.text for answer in answers):
        return "the server's answers are empty"
    return "the model does not answer sense"


def run(name: str, check: Callable[[checks.Lab], Verdict], lab: checks.Lab) -> dict[str, Any]:
    """One check; what the server refuses, drops or replies oddly on the way is its failure.

    Not that it is busy: that says nothing about pictures.
    """
    started = time.monotonic()
    try:
        found = check(lab)
    except Busy as error:
        found = skipped("nothing, a request of this check was not taken", str(error))
    except (Refused, Unreachable) as error:
        found = Verdict(FAILED, "a request of this check against any answer", str(error))
    except BadReply as error:
        found = Verdict(FAILED, "the form of an answer", str(error))
    seconds = time.monotonic() - started
    say(f"{found.state:8} {name} ({seconds:.1f} s)")
    say(f"         compared: {found.compared}")
    say(f"         {'why' if found.state == SKIPPED else 'found'}: {found.detail}")
    return {
        "name": name,
        "state": found.state,
        "compared": found.compared,
        "detail": found.detail,
        "seconds": round(seconds, 2),
    }
