"""The validator's command line: what cannot be done is refused, with what to type.

exit codes:
  0    no check failed: each passed or was skipped, with the reason
  1    a check failed
  2    bad usage; nothing was checked
  3    no usable server; nothing was checked
  4    the result could not be written or printed
  5    an error inside this tool
  6    environment: a package is missing; nothing was checked
  130  interrupted
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shlex
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from vision_exp.validate.output import USAGE, Stop

COMMAND = "python3 hotfix.py validate"
EXAMPLE = "--url http://HOST:PORT/v1"
#: Seconds that a request has; a day is more than any takes.
TIMEOUT, LONGEST_TIMEOUT = 120, 86400


@dataclasses.dataclass(frozen=True)
class Options:
    """``url`` without a slash at its end; ``timeout`` in seconds; empty strings: not given."""

    url: str
    model: str = ""
    api_key: str = ""
    timeout: float = TIMEOUT
    json: Path | None = None

    def again(self, **changed: Any) -> str:
        """The command as it was given, but for what changed. Hints get logged: no key is shown."""
        given = {**vars(self), "api_key": self.api_key and "KEY", **changed}
        given["timeout"] = "" if given["timeout"] == TIMEOUT else f"{given['timeout']:g}"
        words = [f"--{k.replace('_', '-')} {shlex.quote(str(v))}" for k, v in given.items() if v]
        return " ".join([COMMAND, *words])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _refusal(message)


def parse(argv: list[str] | None) -> Options:
    """What was asked for. Raises Stop where it cannot be done, before anything is asked."""
    parser = _Parser(
        prog=COMMAND,
        description="Checks a running server's image input from outside.",
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", required=True, type=_url, help=f"base URL, as {EXAMPLE}")
    add("--model", default="", help="default: the first that the server lists")
    add("--api-key", default="", type=_key, help="sent as a bearer token")
    limit = "seconds for each request: to the end of its reply, of a stream to its first piece"
    add("--timeout", default=TIMEOUT, type=_seconds, help=f"{limit}; default {TIMEOUT}")
    add("--json", type=Path, metavar="FILE", help="write the result there")
    return Options(**vars(parser.parse_args(argv)))


def _refusal(message: str, hint: str = EXAMPLE) -> Stop:
    hint = f"{COMMAND} {hint}   (--help has all options)"
    return Stop(USAGE, f"{message}. Nothing was checked.", hint)


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise _refusal(f"--url {text} is no URL: {error}") from error
    clean = text.isascii() and text.isprintable() and " " not in text
    beyond = "?" in text or "#" in text  # also with nothing after it, which urlsplit does not tell
    for wrong, words, hint in (
        (not clean, f"{text!r} has characters that no URL has", EXAMPLE),
        (text and "://" not in text, f"{text} has no scheme: add http://", f"--url http://{text}"),
        (not host, f"{text!r} names no host", EXAMPLE),
        (
            parts.scheme not in ("http", "https"),
            f"{text} has the scheme {parts.scheme}, not http or https",
            EXAMPLE,
        ),
        (parts.username is not None, "has a user name in it", f"{EXAMPLE} --api-key KEY"),
        (beyond, f"{text} goes on after the path: it must be the base URL", EXAMPLE),
    ):
        if wrong:
            raise _refusal(f"--url {words}", hint)
    return text.rstrip("/")


def _key(text: str) -> str:
    if text.isascii() and text.isprintable():
        return text
    # The key itself is not shown: what is printed here ends up in logs.
    fault = "--api-key has a line break or another character that no HTTP header may have"
    raise _refusal(fault, f"{EXAMPLE} --api-key \"$(tr -d '\\r\\n' <FILE)\"")


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) <= LONGEST_TIMEOUT:
            return float(text)
    fault = f"--timeout {text} is no number of seconds above 0 and up to {LONGEST_TIMEOUT}"
    raise _refusal(fault, f"{EXAMPLE} --timeout {TIMEOUT}")
