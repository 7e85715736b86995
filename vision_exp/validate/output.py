"""What a run says and writes: one line a statement, a refusal with its next step, the result."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

FINE, A_CHECK_FAILED, USAGE, NO_SERVER, NOT_WRITTEN, UNEXPECTED, ENVIRONMENT = range(7)
INTERRUPTED = 130


class NotPrinted(Exception):
    """Standard output takes nothing more."""


class Stop(Exception):
    """A run that ends without a result: ``code`` is the exit code, ``hint`` the next command."""

    def __init__(self, code: int, message: str, hint: str) -> None:
        super().__init__(message)
        self.code, self.hint = code, hint

    def show(self) -> int:
        """Says so on standard error, in two lines; returns the exit code."""
        print(line(f"[vision-exp] {self}"), line(f"next: {self.hint}"), sep="\n", file=sys.stderr)
        return self.code


def line(text: str) -> str:
    """``text`` on one line: a server's words must neither look like ours nor drive a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def say(text: str) -> None:
    """Prints one line, and knows whether it got out. Raises NotPrinted."""
    try:
        print(line(text), flush=True)
    except OSError as error:
        raise NotPrinted(error.strerror or str(error)) from error


def prepare(path: Path, again: str) -> None:
    """Removes an earlier result, not to be taken for this run's, and tries if one can be written.

    Devices and pipes stay. ``again``: the command without its file, for a hint. Raises Stop.
    """
    fault, hint = "", f"{again} --json FILE"
    try:
        if path.is_dir():
            fault, hint = " is a folder", f"{again} --json {path / 'validate.json'}"
        elif not path.parent.is_dir():
            fault, hint = f": there is no folder {path.parent}", f"mkdir -p {path.parent}"
        elif path.is_file() or not path.exists():
            path.unlink(missing_ok=True)
            path.touch()
            path.unlink()
    except (OSError, ValueError) as error:
        fault = f" cannot be written: {error}"
    if fault:
        raise Stop(USAGE, f"--json {path}{fault}. Nothing was checked.", hint)


def write(path: Path, hint: str, result: dict[str, Any]) -> None:
    """The result, whole or not at all. Raises Stop."""
    beside = path.with_name(f".validate-{os.getpid()}.tmp")
    try:
        # A device or pipe is written to; what was a file is removed.
        target = path if path.exists() else beside
        target.write_text(json.dumps(result, indent=1) + "\n")
        if target is beside:
            beside.replace(path)
    except OSError as error:
        words = f"--json {path} cannot be written: {error.strerror}. The result is above."
        raise Stop(NOT_WRITTEN, words, hint) from error
    finally:
        beside.unlink(missing_ok=True)
