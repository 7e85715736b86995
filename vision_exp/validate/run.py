"""All checks on one server, and what to do where it cannot be used."""

from __future__ import annotations

import shlex
import time
from typing import Any
from urllib.parse import urljoin

from vision_exp.validate.checks import CHECKS, Check
from vision_exp.validate.client import BUSY, Client, Refused, ServerError, TooLate
from vision_exp.validate.judge import Verdict
from vision_exp.validate.output import NO_SERVER, Stop, say
from vision_exp.validate.reply import BadReply
from vision_exp.validate.session import NoImages, Session, explore
from vision_exp.validate.usage import COMMAND, EXAMPLE, LONGEST_TIMEOUT, Options


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
        "trained": not session.incoherent_reason,
        "noise_nats": None if noise.incomparable else noise.moved,
        "noise": {"moved": noise.moved, "lost": noise.incomparable, "repeats": noise.repeats},
    }


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
    longer = options.again(timeout=min(LONGEST_TIMEOUT, max(600, 2 * options.timeout)))
    base = urljoin(f"{options.url}/models", getattr(error, "target", "")).removesuffix("/models")
    hints = (
        (
            isinstance(error, BadReply),
            f"{COMMAND} {EXAMPLE}   (the base URL of an OpenAI-compatible chat server)",
        ),
        (isinstance(error, TooLate), f"{longer}   (if the server is only slow; else see its log)"),
        (status == BUSY, f"{again}   (later: the server is busy)"),
        (status >= 500, f"{again}   (once the server's log shows why, and that is fixed)"),
        (
            isinstance(error, NoImages),
            "python3 hotfix.py status   (is vLLM patched, the model a Vision-Exp one, and the "
            "server started with --limit-mm-per-prompt '{\"image\":16}'?)",
        ),
        (
            isinstance(error, Refused) and error.target and 300 <= status < 400,
            f"{COMMAND} --url {shlex.quote(base)}   (if you trust where the redirect leads)",
        ),
        (status in (401, 403), options.again(api_key="KEY")),
        (
            status == 404 and not options.url.endswith("/v1"),
            f"{COMMAND} {EXAMPLE}   (the base URL, up to and with /v1)",
        ),
        (status == 404 and options.model, f"{listed}   (has the names that --model takes)"),
        (True, f"{listed}   (must list the models; else start the server, or correct --url)"),
    )
    words = f"no usable server: {error}. Nothing was checked."
    return Stop(NO_SERVER, words, next(hint for holds, hint in hints if holds))
