"""Turns a report into what a person or a program reads."""

from __future__ import annotations

import os
import sys

from anchors.report import PREFIX, Report

# Not from typing, whose import would take a tenth of the time that a second run may take.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_GREEN, _YELLOW, _RED, _PLAIN = "\033[32m", "\033[33m", "\033[31m", "\033[0m"
_GOOD = ("applied", "superseded", "not-applicable", "staged")
_FAIR = ("pristine", "stale", "outdated", "interrupted", "applied-unrecorded", "missing")


def print_json(report: Report) -> None:
    """The whole report as one JSON object."""
    import json

    print(json.dumps(report, indent=1))


def uses_colour(choice: str) -> bool:
    """Whether to colour: as told, or only on a terminal that wants it."""
    if choice != "auto":
        return choice == "always"
    return (
        sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")
    )


def text(report: Report, *, colour: bool, verbose: bool) -> str:
    """The report for a person: the tree, one line per anchor, the overlay, the last word."""
    vllm = report["vllm"]
    lines = [
        f"{PREFIX} vLLM {vllm['version'] or 'of unknown version'} at {vllm['root']}: "
        f"{_paint(report['state'], colour)}"
    ]
    if report["detail"]:
        lines.append(f"{PREFIX} {report['detail']}")
    for file in report["files"]:
        for anchor in file["anchors"]:
            state = _paint(anchor["state"], colour, width=14)
            line = f"{PREFIX}   {anchor['id']:<18} {state}  {file['path']}"
            detail = anchor.get("detail", "")
            shown = verbose or anchor["state"] not in ("applied", "pristine", "outdated")
            lines.append(f"{line}  ({detail})" if detail and shown else line)
    overlay = report["overlay"]
    if overlay:
        lines.append(
            f"{PREFIX} overlay {overlay['digest'][:12]} in {overlay['root']}: "
            f"{_paint(overlay['state'], colour)}"
        )
    if report["plan"]:
        lines.append(f"{PREFIX} plan {report['plan'][:12]}")
    lines += [f"{PREFIX} cleared {path}" for path in report["caches"]]
    lines += [f"{PREFIX} note: {note}" for note in report["notes"]]
    return "\n".join(lines)


def failure(error: dict[str, Any], *, verbose: bool) -> str:
    """An error for a person: cause and consequence first, the next command last."""
    lines = [f"{PREFIX} {error['message']}"]
    lines += [f"{PREFIX}   {line}" for line in error["context"]]
    if error["hint"]:
        lines.append(f"next: {error['hint']}")
    if verbose:
        lines.append(f"{PREFIX} reference: {error['reference']}")
    return "\n".join(lines)


def diff(text: str) -> str:
    """A unified diff in colour: removed lines red, added ones green."""
    tints = {"-": _RED, "+": _GREEN}
    lines = (
        f"{tints[line[0]]}{line}{_PLAIN}" if line[:1] in tints else line
        for line in text.split("\n")
    )
    return "\n".join(lines)


def _paint(word: str, colour: bool, width: int = 0) -> str:
    padded = f"{word:<{width}}"
    if not colour:
        return padded
    tint = _GREEN if word in _GOOD else _YELLOW if word in _FAIR else _RED
    return f"{tint}{padded}{_PLAIN}"
