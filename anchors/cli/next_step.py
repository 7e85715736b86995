"""What to type next: commands that can be pasted, with the arguments that this run was given."""

from __future__ import annotations

import re
import shlex

# Not from typing, whose import would take a tenth of the time that a second run may take.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

#: Verbs that work on the tree and overlay that the two options name.
_COMMAND = re.compile(r"python3 hotfix\.py(?= (?:-v |-q )?(?:apply|revert|status|verify|diff)\b)")
_APPLY = "python3 hotfix.py apply"
#: Next step by state, where no refusal has a hint of its own.
AFTER = {
    "pristine": _APPLY,
    "outdated": _APPLY,
    "stale": _APPLY,
    "interrupted": _APPLY,
    "superseded": "serve the model as it is: this vLLM needs no hotfix",
}


def given(arguments: argparse.Namespace) -> str:
    """The options that name the tree and the overlay, as typed, quoted for the shell."""
    named = (("--root", arguments.root), ("--overlay-root", arguments.overlay_root))
    return " ".join(f"{name} {shlex.quote(value)}" for name, value in named if value)


def completed(words: str, options: str) -> str:
    """``words`` with ``options`` in every command that works on the tree they name."""
    return _COMMAND.sub(lambda found: f"{found[0]} {options}", words) if options else words
