"""How the validator prints: one line a statement, whatever a server put into its words."""

from __future__ import annotations

from typing import Any


class NotPrinted(Exception):
    """Standard output takes nothing more; the cause is an OSError."""


def line(text: str) -> str:
    """``text`` on one line: a server's words must neither look like ours nor drive a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def say(text: str) -> None:
    """Prints one line, and knows whether it got out. Raises NotPrinted."""
    try:
        print(line(text), flush=True)
    except OSError as error:
        raise NotPrinted(error.strerror or str(error)) from error


def shown(value: Any, most: int = 80) -> str:
    """The start of a value that a server sent; what could be read may be too deep to show."""
    try:
        return repr(value)[:most]
    except RecursionError:
        return "something nested too deeply"
