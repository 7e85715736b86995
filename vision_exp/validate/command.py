"""The validator's command line, what it says, and its result file.

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

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

FINE, A_CHECK_FAILED, USAGE, NO_SERVER, NOT_WRITTEN, UNEXPECTED, ENVIRONMENT = range(7)
INTERRUPTED = 130
COMMAND, EXAMPLE = "python3 hotfix.py validate", "--url http://HOST:PORT/v1"
#: Seconds that a request has; a day is more than any takes.
TIMEOUT, LONGEST_TIMEOUT = 120, 86400


class Stop(Exception):
    """A run that ends without a result: exit code, and the next command; its own with ``>FILE``."""

    def __init__(self, code: int, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code, self.hint = code, hint

    def show(self, again: str) -> int:
        """Says so on standard error, in two lines; returns the exit code."""
        hint = self.hint or f"{again} >FILE   (where there is space)"
        print(line(f"[vision-exp] {self}"), line(f"next: {hint}"), sep="\n", file=sys.stderr)
        return self.code


def line(text: str) -> str:
    """``text`` on one line: a server's words must neither look like ours nor drive a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def say(text: str) -> None:
    """Prints one line, and knows whether it got out. Raises Stop."""
    try:
        print(line(text), flush=True)
    except OSError as error:
        words = f"standard output takes nothing: {error.strerror}. No result was written."
        raise Stop(NOT_WRITTEN, words) from error


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
    def error(self, message: str, hint: str = EXAMPLE) -> NoReturn:
        hint = f"{COMMAND} {hint}   (--help has all options)"
        raise Stop(USAGE, f"{message}. Nothing was checked.", hint)


def parse(argv: list[str] | None) -> Options:
    """What was asked for. Raises Stop where it cannot be done, before anything is asked."""
    parser = _Parser(
        prog=COMMAND,
        description="Checks a running server's image input from outside.",
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", required=True, help=f"base URL, as {EXAMPLE}")
    add("--model", default="", help="default: the first that the server lists")
    add("--api-key", default="", help="sent as a bearer token")
    limit = "seconds for each request: to the end of its reply, of a stream to its first piece"
    add("--timeout", default=TIMEOUT, help=f"{limit}; default {TIMEOUT}")
    add("--json", type=Path, metavar="FILE", help="write the result there")
    given = parser.parse_args(argv)
    url, key, timeout, seconds = given.url, given.api_key, given.timeout, 0.0
    with contextlib.suppress(ValueError):
        seconds = float(timeout)
    try:
        parts = urlsplit(url)
        host, scheme, _ = parts.hostname, parts.scheme, parts.port
    except ValueError as error:
        parser.error(f"--url {url} is no URL: {error}")
    clean = f"{EXAMPLE} --api-key \"$(tr -d '\\r\\n' <FILE)\""
    slow = f"--timeout {timeout} is no number of seconds above 0 and up to {LONGEST_TIMEOUT}"
    # A key or password is not shown: what is printed here ends up in logs.
    for holds, fault, *hint in (
        (re.fullmatch("[!-~]*", url), f"--url {url!r} has characters that no URL has"),
        (not url or "://" in url, f"--url {url} has no scheme: add http://", f"--url http://{url}"),
        (host, f"--url {url!r} names no host"),
        (scheme in ("http", "https"), f"--url has the scheme {scheme}, not http or https"),
        (parts.username is None, "--url has a user name in it", f"{EXAMPLE} --api-key KEY"),
        (not {*"?#"} & {*url}, f"--url {url} goes on after the path: it is no base URL"),
        (re.fullmatch("[ -~]*", key), "--api-key has a line break, or is no ASCII", clean),
        (0 < seconds <= LONGEST_TIMEOUT, slow, f"{EXAMPLE} --timeout {TIMEOUT}"),
    ):
        if not holds:
            parser.error(fault, *hint)
    return Options(url.rstrip("/"), given.model, key, seconds, given.json)


def write(options: Options, result: dict[str, Any] | None = None) -> None:
    """The result, whole or not at all, where a file was named; a device or pipe stays one.

    Without a result it removes an earlier one, and tries if another can be written. Raises Stop.
    """
    if sys.stdout is None:
        raise Stop(NOT_WRITTEN, "standard output is closed, for any result. Nothing was checked.")
    if not (path := options.json):
        return
    beside = path.parent / f".validate-{os.getpid()}.tmp"
    try:
        if path.is_dir():
            raise IsADirectoryError
        special = path.exists() and not path.is_file()
        if result or not special:
            (path if special else beside).write_text(json.dumps(result, indent=1) + "\n")
        if not special:
            beside.replace(path)
        if not (result or special):
            path.unlink()
    except OSError as error:
        hints = {
            IsADirectoryError: ("it is a folder", options.again(json=path / "validate.json")),
            FileNotFoundError: (f"there is no folder {path.parent}", f"mkdir -p {path.parent}"),
        }
        other = error.strerror, f"{options.again(json=None)} --json FILE"
        fault, hint = hints.get(type(error), other)
        end = (NOT_WRITTEN, "The result is above.") if result else (USAGE, "Nothing was checked.")
        raise Stop(end[0], f"--json {path} cannot be written: {fault}. {end[1]}", hint) from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()
