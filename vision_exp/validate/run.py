"""All checks on one server, and what to do where it cannot be used."""

from __future__ import annotations

import asyncio
import shlex
import time
from typing import Any
from urllib.parse import urljoin

from vision_exp.validate import command
from vision_exp.validate.checks import CHECKS, Check
from vision_exp.validate.client import BUSY, BadReply, Client, ServerError, TooLate
from vision_exp.validate.command import COMMAND, EXAMPLE, Options, Stop, say
from vision_exp.validate.judge import Verdict
from vision_exp.validate.session import NoImages, Session, explore

Results = list[dict[str, Any]]


def everything(options: Options) -> int:
    """Runs all checks, says and writes what they found; returns the exit code. Raises Stop."""
    results: Results = []
    try:
        session = asyncio.run(_judge(options, results))
    except KeyboardInterrupt:
        left = len(CHECKS) - len(results)
        say(f"{_tally(results)[0]}; interrupted: of {left} checks nothing is known")
        raise
    words, counts = _tally(results)
    say(words + ("; of what was skipped nothing is known" if counts["skipped"] else ""))
    noise, found = session.noise, {"schema": 1, "url": options.url, "model": session.client.model}
    found["trained"] = not session.incoherent_reason
    found["noise_nats"] = None if noise.incomparable else noise.moved
    found["noise"] = {"moved": noise.moved, "lost": noise.incomparable, "repeats": noise.repeats}
    command.write(options, found | counts | {"checks": results})
    return command.A_CHECK_FAILED if counts["failed"] else command.FINE


async def _judge(options: Options, results: Results) -> Session:
    client = Client(options.url, options.model, options.api_key, options.timeout)
    try:
        session = await explore(client)
    except ServerError as error:
        raise no_server(options, error) from error
    for check in CHECKS:
        results.append(await run(check, session))
    return session


def _tally(results: Results) -> tuple[str, dict[str, int]]:
    states = [result["state"] for result in results]
    counts = {state: states.count(state) for state in ("passed", "failed", "skipped")}
    return ", ".join(f"{count} {state}" for state, count in counts.items()), counts


async def run(check: Check, session: Session) -> dict[str, Any]:
    """One check; what the server refuses, drops or malforms on the way is its failure.

    Not that it is busy: that says nothing about images.
    """
    started = time.monotonic()
    try:
        missing = check.missing(session)
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
    status, again, listed = error.status, options.again(), f"curl {options.url}/models"
    longer = options.again(timeout=min(command.LONGEST_TIMEOUT, max(600, 2 * options.timeout)))
    to = urljoin(f"{options.url}/models", error.target).removesuffix("/models")
    base = isinstance(error, BadReply) or (status == 404 and not options.url.endswith("/v1"))
    needs = "is vLLM patched, the model a Vision-Exp one, and the server started with"
    hints = (
        (base, f"{COMMAND} {EXAMPLE}   (an OpenAI-compatible server's base URL, with /v1)"),
        (isinstance(error, TooLate), f"{longer}   (if the server is only slow; else see its log)"),
        (status == BUSY, f"{again}   (later: the server is busy)"),
        (status >= 500, f"{again}   (once the server's log shows why, and that is fixed)"),
        (
            isinstance(error, NoImages),
            f"python3 hotfix.py status   ({needs} --limit-mm-per-prompt '{{\"image\":16}}'?)",
        ),
        (error.target, f"{COMMAND} --url {shlex.quote(to)}   (if you trust where this leads)"),
        (status in (401, 403), options.again(api_key="KEY")),
        (True, f"{listed}   (names the models; else start the server, or correct --url, --model)"),
    )
    words = f"no usable server: {error}. Nothing was checked."
    return Stop(command.NO_SERVER, words, next(hint for holds, hint in hints if holds))
