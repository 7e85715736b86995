"""What was done, kept beside it: lets a second run answer without parsing anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anchors import __version__
from anchors.digests import tool_digest
from anchors.engine.versions import is_newer
from anchors.errors import refused
from anchors.writing import state

SCHEMA = 1
_KEPT = ("vllm", "plan", "files", "overlay", "notes", "judged", "platform")
_KINDS = {"files": list, "overlay": dict, "plan": str, "tool": dict, "vllm": dict, "notes": list}


@dataclass(frozen=True)
class Receipt:
    """What a run did: the plan's digest, where the overlay went, and for each target file the
    digests before and after (None: no such file). `judged` are the digests of the other files that
    the state rests on, and `platform` what the vLLM was built for."""

    plan: str
    overlay_root: str
    before: Mapping[str, str | None]
    after: Mapping[str, str | None]
    judged: Mapping[str, str | None]
    platform: str


def load(vllm_root: str) -> tuple[Receipt | None, str]:
    """(receipt, note): the note says so when there is one that cannot be read.

    Raises HotfixError (exit 3) for a receipt of a newer tool.
    """
    path = state.receipt_path(vllm_root)
    try:
        with open(path, "rb") as file:
            content = json.loads(file.read())
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except (ValueError, RecursionError) as error:
        return None, f"the receipt cannot be read ({error}): judged from the files instead"
    if not isinstance(content, dict) or not isinstance(content.get("schema"), int):
        return None, "the receipt is not one of this tool: judged from the files instead"
    tool = content.get("tool")
    version = str(tool.get("version", "")) if isinstance(tool, dict) else ""
    if content["schema"] > SCHEMA or is_newer(version):
        raise refused(
            "newer-receipt",
            f"this vLLM was patched by vision-exp {version}, this is {__version__}; a newer "
            "one's work is not undone. Nothing was changed.",
            path,
            hint=f"use vision-exp {version} or later",
            state="applied",
        )
    if not _is_well_formed(content):
        return None, "the receipt lacks entries: judged from the files instead"
    return read(content), ""


def read(content: Mapping[str, Any]) -> Receipt:
    """The receipt that a well-formed JSON object, or a report of an applied tree, tells."""
    return Receipt(
        plan=content["plan"],
        overlay_root=content["overlay"]["root"],
        before={file["path"]: file["before"] for file in content["files"]},
        after={file["path"]: file["after"] for file in content["files"]},
        judged=content.get("judged", {}),
        platform=content.get("platform", ""),
    )


def encode(report: Mapping[str, Any]) -> bytes:
    """The bytes of a receipt for a tree that `report` describes as applied."""
    kept = {name: report[name] for name in _KEPT}
    content = {
        "schema": SCHEMA,
        "tool": {"version": __version__, "digest": tool_digest()},
        **kept,
    }
    return (json.dumps(content, indent=1) + "\n").encode()


def _is_well_formed(content: dict[str, Any]) -> bool:
    if not all(isinstance(content.get(name), kind) for name, kind in _KINDS.items()):
        return False
    overlay = content["overlay"]
    if not all(isinstance(overlay.get(name), str) for name in ("root", "digest")):
        return False
    needed = {"path", "before", "after", "anchors"}
    return all(isinstance(file, dict) and needed <= set(file) for file in content["files"])
