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
    """Standard output takes nothing more; the cause is an OSError."""


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


def remove_old(path: Path | None, hint: str) -> None:
    """An earlier result must not be taken for this run's. Devices and pipes stay. Raises Stop."""
    try:
        if path and path.is_file():
            path.unlink()
    except OSError as error:
        words = f"--json {path}: the old file cannot be removed: {error.strerror}."
        raise Stop(USAGE, f"{words} Nothing was checked.", hint) from error


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
