"""Answers "applied" from the receipt alone: standard library, no parsing, no writing."""

from __future__ import annotations

import os

from anchors import UNSTAGED, digests
from anchors.engine import platforms
from anchors.writing import state

# Not from typing, whose import would take a tenth of the time that a second run may take.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

PACKAGE = "vision_exp"
ENVIRONMENT_NAME = "VISION_EXP_OVERLAY_ROOT"


def requested_root(option: str | None) -> str | None:
    """The overlay root asked for by option or environment, absolute; None where neither is."""
    root = option or os.environ.get(ENVIRONMENT_NAME)
    return os.path.abspath(os.path.expanduser(root)) if root else None


def read_shipped() -> dict[str, bytes]:
    """The overlay as this tool ships it, relative path -> bytes; a run reads it here and once."""
    files = digests.read_package(os.path.join(digests.TOOL_ROOT, PACKAGE))
    return {path: data for path, data in files.items() if path.split("/")[0] not in UNSTAGED}


def applied(
    vllm_root: str, overlay_root: str | None, shipped: Mapping[str, bytes]
) -> dict[str, Any] | None:
    """The receipt of the vLLM if all it says still holds, else None.

    `overlay_root` is the one asked for, None where the recorded one is meant; `shipped` is the
    overlay that this tool would stage. Any doubt, also about the receipt itself, is left to the
    full path.
    """
    import json

    if state.is_interrupted(vllm_root):
        return None
    try:
        with open(state.receipt_path(vllm_root), "rb") as file:
            receipt = json.loads(file.read())
        overlay = receipt["overlay"]
        holds = (
            receipt["schema"] == 1
            and receipt["tool"]["digest"] == digests.tool_digest()
            and overlay_root in (None, overlay["root"])
            and overlay["digest"] == digests.manifest_digest(shipped)
            and overlay["digest"] == digests.staged_digest(os.path.join(overlay["root"], PACKAGE))
            and digests.writable_by_others(overlay["root"]) is None
            and receipt["platform"] == platforms.of(vllm_root).name
            and all(
                digests.file_digest(os.path.join(vllm_root, path)) == digest
                for path, digest in (
                    *((file["path"], file["after"]) for file in receipt["files"]),
                    *receipt["judged"].items(),
                )
            )
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return receipt if holds else None
