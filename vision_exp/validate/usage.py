"""The validator's command line, and its refusals: what happened first, what to type last."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from vision_exp.validate.text import line

FINE, A_CHECK_FAILED, USAGE, NO_SERVER, NOT_WRITTEN, UNEXPECTED, ENVIRONMENT = range(7)
INTERRUPTED = 130
EXIT_CODES = """exit codes:
  0    no check failed: each passed or was skipped, with the reason
  1    a check failed
  2    bad usage; nothing was checked
  3    no usable server; nothing was checked
  4    the result could not be written or printed
  5    an error inside this tool
  6    environment: Pillow is missing; nothing was checked
  130  interrupted
"""
COMMAND = "python3 -m vision_exp.validate"
EXAMPLE = "http://HOST:PORT/v1"
#: Seconds that a request has; a day is more than any takes, and less than the sockets' own limit.
TIMEOUT, LONGEST_TIMEOUT = 120, 86400


class Stop(Exception):
    """A run that ends without a result: ``code`` is the exit code, ``hint`` the next command."""

    def __init__(self, code: int, message: str, hint: str) -> None:
        super().__init__(message)
        self.code, self.hint = code, hint

    def show(self) -> None:
        """On standard error, as one line each."""
        print(line(f"[vision-exp] {self}"), line(f"next: {self.hint}"), sep="\n", file=sys.stderr)


@dataclass(frozen=True)
class Options:
    """``url`` without a slash at its end; ``timeout`` in seconds; empty strings: not given."""

    url: str
    model: str
    key: str
    timeout: float
    json: Path | None

    @property
    def without_file(self) -> str:
        """The command as it was given, without ``--json``; a key is not shown: hints get logged."""
        model = f" --model {shlex.quote(self.model)}" if self.model else ""
        key = " --api-key KEY" if self.key else ""
        limit = f" --timeout {self.timeout:g}" if self.timeout != TIMEOUT else ""
        return f"{COMMAND} --url {shlex.quote(self.url)}{model}{key}{limit}"

    @property
    def again(self) -> str:
        """The command as it was given."""
        file = f" --json {shlex.quote(str(self.json))}" if self.json else ""
        return self.without_file + file


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _usage(message, "")


def options(argv: list[str] | None, about: str) -> Options:
    """What was asked for. Raises Stop where it cannot be done, before anything is asked."""
    parser = _Parser(
        prog=COMMAND,
        description=about,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", required=True, help=f"base URL, as {EXAMPLE}")
    parser.add_argument("--model", default="", help="default: the first that the server lists")
    parser.add_argument("--api-key", default="", help="sent as a bearer token")
    limit = "seconds for each request: to the end of its reply, of a stream to its first piece"
    parser.add_argument("--timeout", default=str(TIMEOUT), help=f"{limit}; default {TIMEOUT}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args(argv)
    return Options(
        _url(args.url), args.model, _key(args.api_key), _seconds(args.timeout), _file(args.json)
    )


def _usage(message: str, option: str) -> Stop:
    hint = f"{COMMAND} {option or f'--url {EXAMPLE}'}"
    return Stop(USAGE, f"{message}. Nothing was checked.", f"{hint}   (--help has all options)")


def _url(url: str) -> str:
    example = f"--url {EXAMPLE}"
    if not url.isascii() or not url.isprintable() or " " in url:
        raise _usage(f"--url {url!r} has characters that no URL has", example)
    if url and "://" not in url:
        raise _usage(f"--url {url} has no scheme: add http://", f"--url http://{url}")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise _usage(f"--url {url} is no URL: {error}", example) from error
    if not host:
        raise _usage(f"--url {url!r} names no host", example)
    if parts.scheme not in ("http", "https"):
        raise _usage(f"--url {url} has the scheme {parts.scheme}, not http or https", example)
    if parts.username is not None:
        raise _usage("--url has a user name in it", f"{example} --api-key KEY")
    if "?" in url or "#" in url:  # also with nothing after it, which urlsplit does not tell
        raise _usage(f"--url {url} goes on after the path: it must be the base URL", example)
    return url.rstrip("/")


def _key(key: str) -> str:
    if not key.isascii() or not key.isprintable():
        # The key itself is not shown: what is printed here ends up in logs.
        raise _usage(
            "--api-key has a line break or another character that no HTTP header may have",
            f"--url {EXAMPLE} --api-key \"$(tr -d '\\r\\n' <FILE)\"",
        )
    return key


def _seconds(told: str) -> float:
    try:
        seconds = float(told)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_TIMEOUT:
        raise _usage(
            f"--timeout {told} is no number of seconds above 0 and up to {LONGEST_TIMEOUT}",
            f"--url {EXAMPLE} --timeout {TIMEOUT}",
        )
    return seconds


def _file(path: Path | None) -> Path | None:
    if path is None:
        return None
    try:
        folder, is_folder, exists = path.parent, path.is_dir(), path.exists()
        there = folder.is_dir()
    except (OSError, ValueError) as error:
        raise _usage(f"--json {str(path)!r}: {error}", f"--url {EXAMPLE} --json FILE") from error
    if is_folder:
        name = path / "validate.json"
        raise _usage(f"--json {path} is a folder", f"--url {EXAMPLE} --json {name}")
    if not there:
        raise Stop(
            USAGE,
            f"--json {path}: there is no folder {folder}. Nothing was checked.",
            f"mkdir -p {folder}",
        )
    # A file is replaced, for which its folder has to be written; a device is not.
    file_there = path.is_file()
    if not os.access(path if exists and not file_there else folder, os.W_OK):
        raise _usage(f"--json {path} cannot be written", f"--url {EXAMPLE} --json FILE")
    return path
