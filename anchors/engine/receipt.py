"""What was done, kept beside it: lets a second run answer without parsing anything."""

from __future__ import annotations

import json
import os
from typing import Any

from anchors import __version__
from anchors.digests import tool_digest
from anchors.errors import refused
from anchors.writing.journal import STATE_FOLDER

SCHEMA = 1
Receipt = dict[str, Any]


def receipt_path(root: str) -> str:
    """Where the receipt of the vLLM at `root` lies."""
    return os.path.join(root, STATE_FOLDER, "receipt.json")


def load(root: str) -> tuple[Receipt | None, str]:
    """(receipt, note): the note says so when there is one that cannot be read.

    Raises HotfixError (exit 3) for a receipt of a newer tool.
    """
    try:
        with open(receipt_path(root), "rb") as file:
            receipt = json.loads(file.read())
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except (ValueError, RecursionError) as error:
        return None, f"the receipt cannot be read ({error}): judged from the files instead"
    if not isinstance(receipt, dict) or not isinstance(receipt.get("schema"), int):
        return None, "the receipt is not one of this tool: judged from the files instead"
    tool = receipt.get("tool")
    version = str(tool.get("version", "")) if isinstance(tool, dict) else ""
    if receipt["schema"] > SCHEMA or _newer(version):
        raise refused(
            "newer-receipt",
            f"this vLLM was patched by vision-exp {version}, this is {__version__}; a newer "
            "one's work is not undone. Nothing was changed.",
            receipt_path(root),
            hint=f"use vision-exp {version} or later",
            state="applied",
        )
    if not _well_formed(receipt):
        return None, "the receipt lacks entries: judged from the files instead"
    return receipt, ""


def encode(report: dict[str, Any]) -> bytes:
    """The bytes of a receipt for a tree that `report` describes as applied."""
    kept = {name: report[name] for name in ("vllm", "plan", "files", "overlay", "notes")}
    content = {
        "schema": SCHEMA,
        "tool": {"version": __version__, "digest": tool_digest()},
        **kept,
    }
    return (json.dumps(content, indent=1) + "\n").encode()


def stock_digests(receipt: Receipt | None) -> dict[str, str] | None:
    """Path -> digest of the bytes before patching."""
    if receipt is None:
        return None
    return {file["path"]: file["before"] for file in receipt["files"]}


def _newer(version: str) -> bool:
    numbers = [
        tuple(int(part) for part in text.split(".") if part.isdigit())
        for text in (version, __version__)
    ]
    return numbers[0] > numbers[1]


def _well_formed(receipt: Receipt) -> bool:
    files = receipt.get("files")
    overlay = receipt.get("overlay")
    return (
        isinstance(files, list)
        and all(
            isinstance(f, dict) and {"path", "before", "after", "anchors"} <= set(f) for f in files
        )
        and isinstance(overlay, dict)
        and isinstance(overlay.get("root"), str)
        and isinstance(overlay.get("digest"), str)
        and isinstance(receipt.get("plan"), str)
        and isinstance(receipt.get("tool"), dict)
        and isinstance(receipt.get("vllm"), dict)
        and isinstance(receipt.get("notes"), list)
    )
