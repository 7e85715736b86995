"""Target -> Plan of a revert: our blocks taken out, without LibCST and without a receipt."""

from __future__ import annotations

import os

from anchors.digests import sha256
from anchors.engine import fences, native, platforms, receipt
from anchors.engine.overlay import DEFAULT_ROOT
from anchors.engine.plan import FilePlan, Plan, recorded_root, refuse_newer
from anchors.engine.reading import Reading
from anchors.engine.source import target_paths
from anchors.engine.target import Target
from anchors.errors import refused
from anchors.writing import state


def make(target: Target, requested_root: str | None) -> Plan:
    """Plans to take out what is ours; the plan's state is what the tree is without it.

    `requested_root` is the overlay root asked for, which counts where nothing tells the one in use.
    Raises HotfixError (exit 3) for blocks that are broken, or of a newer tool.
    """
    former, note = receipt.load(target.root)
    notes = [note] if note else []
    before = former.before if former else {}
    files = []
    splits = []
    for path in target_paths():
        full = os.path.join(target.root, path)
        if not os.path.isfile(full):
            if before.get(path) is not None:  # None: the release has no such file
                notes.append(
                    f"{path} is no longer a file: nothing was taken out of it; reinstall vLLM"
                )
            continue
        with open(full, "rb") as file:
            data = file.read()
        parted = _split(target.root, path, data)
        splits.append(parted)
        files.append(FilePlan(path, data, parted.stock, parted.stock, ()))
        changed = before.get(path) not in (None, sha256(parted.stock))
        if changed and parted.stock != data:
            notes.append(f"{path} was changed outside our blocks since; that change stays")
    if former:
        overlay_root = former.overlay_root
    else:
        overlay_root = recorded_root(splits) or requested_root or DEFAULT_ROOT
    verdict = _verdict(target.root, {file.path: file.stock for file in files})
    return Plan(
        target=target,
        state=verdict.state if verdict else "pristine",
        detail=verdict.detail if verdict else "",
        digest="",
        overlay_root=overlay_root,
        overlay=None,
        former=former,
        files=tuple(files),
        notes=tuple(notes),
    )


def _split(vllm_root: str, path: str, data: bytes) -> fences.Split:
    parted = fences.split(data)
    if parted.broken:
        raise refused(
            "mixed",
            f"{path}: {parted.broken}. Our blocks cannot be told apart. Nothing was changed.",
            hint=_recovery_hint(vllm_root, path),
            state="mixed",
        )
    refuse_newer({path: parted})
    return parted


def _recovery_hint(vllm_root: str, path: str) -> str:
    original = state.original_path(vllm_root, path)
    if os.path.isfile(original):
        there = os.path.join(vllm_root, path)
        return f"cp {original} {there} (as before patching), then revert again"
    return "reinstall this vLLM"


def _verdict(vllm_root: str, stock: dict[str, bytes | None]) -> native.Verdict | None:
    """Whether the vLLM has vision code besides ours, and whose; only the words depend on it."""
    try:
        read = Reading(vllm_root, stock).read
        verdict = native.assess(vllm_root, read, platforms.of(vllm_root))
    except OSError:
        return None  # a file that revert does not write need not be readable
    # Where the tree leads otherwise says nothing of whose vision code is in it.
    return verdict if verdict and verdict.state in ("superseded", "foreign") else None
