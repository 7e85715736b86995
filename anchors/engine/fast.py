"""Answers "applied" from the receipt alone: standard library, no parsing, no writing."""

from __future__ import annotations

import os

from anchors import digests

# Not from typing, whose import would take a tenth of the time that a second run may take.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

STATE_FOLDER = ".vision-exp"


def applied(root: str, overlay_root: str | None) -> dict[str, Any] | None:
    """The receipt of the vLLM at `root` if all it says still holds, else None.

    `overlay_root` is the one asked for, None where the recorded one is meant. Any doubt, also
    about the receipt itself, is left to the full path.
    """
    import json

    state = os.path.join(root, STATE_FOLDER)
    if interrupted(root):
        return None
    try:
        with open(os.path.join(state, "receipt.json"), "rb") as file:
            receipt = json.loads(file.read())
        overlay = receipt["overlay"]
        holds = (
            receipt["schema"] == 1
            and receipt["tool"]["digest"] == digests.tool_digest()
            and overlay_root in (None, overlay["root"])
            and overlay["digest"] == _shipped()
            and overlay["digest"]
            == digests.staged_digest(os.path.join(overlay["root"], "vision_exp"))
            and digests.writable_by_others(overlay["root"]) is None
            and all(
                digests.file_digest(os.path.join(root, file["path"])) == file["after"]
                for file in receipt["files"]
            )
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return receipt if holds else None


def interrupted(root: str) -> bool:
    """Whether a journal says that a transaction on the vLLM at `root` is open."""
    return os.path.lexists(os.path.join(root, STATE_FOLDER, "journal.json"))


def _shipped() -> str:
    return digests.manifest_digest(digests.shipped_overlay())
