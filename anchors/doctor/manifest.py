"""Digests of what was patched, to compare between the nodes of a cluster."""

from __future__ import annotations

import json
from typing import Any

from anchors.errors import USAGE, HotfixError

Manifest = dict[str, Any]


def of(report: dict[str, Any]) -> Manifest:
    """The parts of a status report that must be the same on every node."""
    return {
        "tool": report["tool"]["version"],
        "vllm": report["vllm"]["version"],
        "state": report["state"],
        "plan": report["plan"],
        "overlay": report["overlay"]["digest"] if report["overlay"] else None,
        "files": {file["path"]: file["after"] for file in report["files"]},
    }


def load(path: str) -> Manifest:
    """A manifest that another node printed. Raises HotfixError (exit 2)."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError) as error:
        raise HotfixError(
            "bad-manifest",
            f"{path} is no manifest: {error}. Nothing was changed.",
            exit_code=USAGE,
            hint="make one there: python3 hotfix.py doctor --manifest > manifest.json",
        ) from error
    if not isinstance(found, dict) or not isinstance(found.get("files"), dict):
        raise HotfixError(
            "bad-manifest",
            f"{path} is no manifest of this tool. Nothing was changed.",
            exit_code=USAGE,
            hint="make one there: python3 hotfix.py doctor --manifest > manifest.json",
        )
    return found


def differences(here: Manifest, there: Manifest) -> list[str]:
    """What differs, one line each."""
    found = [
        f"{key}: {here[key]} here, {there.get(key)} there"
        for key in here
        if key != "files" and here[key] != there.get(key)
    ]
    for path in sorted({*here["files"], *there["files"]}):
        mine, other = here["files"].get(path), there["files"].get(path)
        if mine != other:
            found.append(f"{path}: {str(mine)[:12]} here, {str(other)[:12]} there")
    return found
