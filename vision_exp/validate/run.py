"""One server: what has to be known of it, all checks, and what to do where it cannot be used."""

import asyncio
import contextlib
import itertools
import shlex
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from urllib.parse import urljoin

from vision_exp.validate import command
from vision_exp.validate.checks import CHECKS, Check, Session
from vision_exp.validate.client import BUSY, LOGPROBS, BadReply, Json, Refused, ServerError, TooLate
from vision_exp.validate.command import COMMAND, EXAMPLE, Options, Stop, say
from vision_exp.validate.images import COLOURS, NAME_COLOUR, colours_named, shows
from vision_exp.validate.judge import FLOOR, Verdict, noise_of

#: DeepSeek-V4's rendering in vLLM thinks if either is true, also as a default of the server.
QUIET: Json = {"chat_template_kwargs": {"thinking": False, "enable_thinking": False}}
FEW = LOGPROBS | {"top_logprobs": 5}
#: What goes along with every request, the best first: servers refuse fields that they do not know,
#: and more alternatives than they were started for.
FIELDS: tuple[Json, ...] = (QUIET | LOGPROBS, QUIET | FEW, LOGPROBS, FEW, QUIET, {})
#: Statuses by which they do, and those that are about the caller, not about an image.
UNKNOWN_FIELD, CALLER = (400, 422), (401, 403, 404, BUSY)
#: Text questions that any trained chat model answers; they decide whether content can be judged.
SENSE = {
    "What is 2 + 3? Answer with one digit.": "5",
    "What is the capital of France? Answer with one word.": "paris",
}


#: Seconds between two words that something still runs.
TICK = 10


class NoImages(ServerError):
    """The server answered text, and refused, dropped or did not see the same with an image."""


def everything(options: Options) -> int:
    """Runs all checks, says and writes what they found; returns the exit code. Raises Stop."""
    results: list[Json] = []
    try:
        session = asyncio.run(_judge(options, results))
    except KeyboardInterrupt:
        left = len(CHECKS) - len(results)
        say(f"{_tally(results)[0]}; interrupted: of {left} checks nothing is known")
        raise
    words, counts = _tally(results)
    say(words + ("; of what was skipped nothing is known" if counts["skipped"] else ""))
    noise, found = session.noise, {"schema": 1, "url": options.url, "model": session.model}
    found["trained"] = not session.incoherent_reason
    found["noise_nats"] = None if noise.incomparable else noise.moved
    found["noise"] = {"moved": noise.moved, "lost": noise.incomparable, "repeats": noise.repeats}
    command.write(options, found | counts | {"checks": results})
    return command.A_CHECK_FAILED if counts["failed"] else command.FINE


def _tally(results: list[Json]) -> tuple[str, dict[str, int]]:
    states = [result["state"] for result in results]
    counts = {state: states.count(state) for state in ("passed", "failed", "skipped")}
    return ", ".join(f"{count} {state}" for state, count in counts.items()), counts


async def _judge(options: Options, results: list[Json]) -> Session:
    session = Session(options.url, options.model, options.api_key, options.timeout)
    try:
        async with progress(f"looking at {options.url}"):
            session = await explore(session)
    except ServerError as error:
        raise no_server(options, error) from error
    for number, check in enumerate(CHECKS, 1):
        async with progress(f"check {number} of {len(CHECKS)}, {check.name}"):
            results.append(await run(check, session))
    return session


@contextlib.asynccontextmanager
async def progress(what: str) -> AsyncIterator[None]:
    """Says on standard error, every `TICK` seconds, that this still runs."""

    async def tell() -> None:
        for seconds in itertools.count(TICK, TICK):
            await asyncio.sleep(TICK)
            print(f"[vision-exp] {what}: {seconds} s so far", file=sys.stderr, flush=True)

    task = asyncio.create_task(tell())
    try:
        yield
    finally:
        task.cancel()


async def explore(session: Session) -> Session:
    """Asks for the model's name, accepted fields, sense and noise. Raises ServerError."""
    session = replace(session, model=session.model or await session.first_model())
    for fields in FIELDS:
        session = replace(session, fields=fields)
        try:
            await session.ask(["Hello"], max_tokens=1)
            break
        except Refused as error:
            if error.status not in UNKNOWN_FIELD or fields is FIELDS[-1]:
                raise
    answers = {question: await session.ask([question]) for question in SENSE}
    salted = await session.attempt(["Hello"], cache_salt="vision-exp")
    say(f"model {session.model} at {session.url}")
    if isinstance(salted, Refused):
        warm = "the server takes no cache_salt, so no answer is known to be cold"
        session = replace(session, warm_reason=warm)
    if not all(SENSE[question] in answer.text.lower() for question, answer in answers.items()):
        incoherent = "the model does not answer sense"
        if any(answer.reasoning and not answer.text for answer in answers.values()):
            asked = (
                "although it was" if QUIET.items() <= session.fields.items() else "and cannot be"
            )
            most = "reasoning and no content within 16 tokens"
            incoherent = f"the server gives {most}, {asked} asked not to think"
        texts = {question: answer.text or answer.reasoning for question, answer in answers.items()}
        say(f"As {incoherent} ({texts}), checks of content will be skipped.")
        session = replace(session, incoherent_reason=incoherent)
    contents = [shows(colour, 200 + index) for index, colour in enumerate(COLOURS[:3])]
    named = f"{session.url}: the model {session.model}"
    plain = (await session.ask([NAME_COLOUR])).prompt_tokens
    try:
        repeats = [await session.repeat(content, times=4) for content in contents]
    except Refused as error:
        if error.status in CALLER:
            raise
        does = "fails at an" if error.status >= 500 else "takes no"
        words = f"{named} answers text but {does} image: {error.reply}"
        raise NoImages(words, error.status) from error
    shown, alike = repeats[0][0], len({answers[0].texts for answers in repeats}) == 1
    if alike and 0 < shown.prompt_tokens <= plain:
        raise NoImages(f"{named} counts {plain} prompt tokens, and no more with an image")
    if alike and not session.incoherent_reason and len(colours_named(shown.text)) < 2:
        raise NoImages(f"{named} answers {shown.text!r} to discs of three colours")
    noise = noise_of(*repeats)
    if noise.incomparable or noise.limit > FLOOR:
        say(
            f"Asked again alone, its answers move by {noise.moved:.2f} nats, or cannot be compared "
            f"({noise.incomparable} of {noise.repeats}): it is not reproducible. Answers further "
            f"away than {noise.limit:.2f} nats count as others, and where answers to another image "
            "are not, nothing is judged."
        )
    return replace(session, noise=noise)


async def run(check: Check, session: Session) -> Json:
    """One check; what the server refuses, drops or malforms on the way is its failure.

    Not that it is busy: that says nothing about images.
    """
    started = time.monotonic()
    try:
        missing = check.needs and getattr(session, check.needs)
        found = Verdict(None, "nothing", missing) if missing else await check.run(session)
    except ServerError as error:
        good = None if error.status == BUSY else False
        found = Verdict(good, "a request of this check against any whole answer", str(error))
    seconds = time.monotonic() - started
    state = {True: "passed", False: "failed", None: "skipped"}[found.good]
    say(f"{state:8} {check.name} ({seconds:.1f} s)")
    say(f"         compared: {found.compared}")
    say(f"         {'why' if found.good is None else 'found'}: {found.detail}")
    words = {"name": check.name, "state": state, "compared": found.compared}
    return words | {"detail": found.detail, "seconds": round(seconds, 2)}


def no_server(options: Options, error: ServerError) -> Stop:
    """The end of a run that could not begin, with the first hint whose condition holds."""
    status, again = error.status, options.again()
    longer = options.again(timeout=min(command.LONGEST_TIMEOUT, max(600, 2 * options.timeout)))
    to = urljoin(f"{options.url}/models", error.target).removesuffix("/models")
    base = isinstance(error, BadReply) or (status == 404 and not options.url.endswith("/v1"))
    asked = "is vLLM patched, the model a Vision-Exp one, and the server started with"
    images = f"python3 hotfix.py status   ({asked} --limit-mm-per-prompt '{{\"image\":16}}'?)"
    hints = {
        f"{COMMAND} {EXAMPLE}   (an OpenAI-compatible server's base URL, with /v1)": base,
        f"{longer}   (if the server is only slow; else see its log)": isinstance(error, TooLate),
        f"{again}   (later: the server is busy)": status == BUSY,
        f"{again}   (once the server's log shows why, and that is fixed)": status >= 500,
        images: isinstance(error, NoImages),
        f"{COMMAND} --url {shlex.quote(to)}   (if you trust where this leads)": error.target,
        options.again(api_key="KEY"): status in (401, 403),
        f"curl {options.url}/models   (names the models; else start the server, or correct --url, "
        "--model)": True,
    }
    blind = isinstance(error, NoImages)
    words = "this server does not see images" if blind else "no usable server"
    words += f": {error}. Nothing was checked."
    return Stop(command.NO_SERVER, words, next(hint for hint, holds in hints.items() if holds))
