"""The report: the one object that every verb gives, that `--json` prints and a person reads."""

from __future__ import annotations

from anchors import __version__

# Not from typing, whose import would take a tenth of the time that a second run may take.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Report = dict[str, Any]
else:
    Report = dict

PREFIX = "[vision-exp]"
SCHEMA = 1


def blank() -> Report:
    """A report with every key that `--json` promises."""
    return {
        "schema": SCHEMA,
        "tool": {"name": "vision-exp", "version": __version__},
        "verb": "",
        "state": "",
        "detail": "",
        "exit": 0,
        "changed": False,
        "vllm": {"root": None, "version": None},
        "plan": None,
        "files": [],
        "overlay": None,
        "caches": [],
        "notes": [],
        "error": None,
        "next": "",
    }
