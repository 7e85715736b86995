"""What staging or removing the overlay writes; overlay roots may be shared by several vLLMs."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass
from typing import Any

from anchors import __version__
from anchors.digests import TOOL_ROOT, read_file, staged_digest, writable_by_others
from anchors.engine.fast import PACKAGE
from anchors.engine.overlay import Package, package_folder
from anchors.engine.source import target_paths
from anchors.errors import environment, refused
from anchors.writing.preflight import mount_of
from anchors.writing.transaction import FileChange, TreeChange

Manifest = dict[str, Any]


@dataclass(frozen=True)
class OverlayChanges:
    """What has to be written for the overlay, and notes for the person."""

    files: tuple[FileChange, ...] = ()
    trees: tuple[TreeChange, ...] = ()
    folders: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def stage(overlay_root: str, vllm_root: str, package: Package) -> OverlayChanges:
    """What `apply` on one vLLM writes.

    Raises HotfixError: a package of somebody else in the place (3), writable by others (6).
    """
    digest = package.digest
    folder, manifest_path = package_folder(overlay_root), _manifest_path(overlay_root)
    manifest, former = _manifest(overlay_root)
    staged = staged_digest(folder)
    _refuse_unsafe(overlay_root, vllm_root)
    in_the_way = os.path.lexists(folder) and not os.path.isdir(folder)
    if in_the_way or (os.path.isdir(folder) and manifest is None and staged != digest):
        raise refused(
            "overlay-foreign",
            f"{folder} exists and was not put there by this tool. Nothing was changed.",
            hint="move it away, or choose another place: --overlay-root DIR",
            state="foreign",
        )
    others = _users(manifest, vllm_root)
    after = _encode(digest, sorted({*others, vllm_root}))
    behind = [other for other in others if not _mentions(other, digest)]
    notes = (
        f"{path} was patched for another overlay than the one in {folder} now: it refuses vision "
        f"checkpoints until `python3 hotfix.py --root {path} apply`"
        for path in behind
    )
    return OverlayChanges(
        files=(FileChange(manifest_path, former, after),) if former != after else (),
        trees=(TreeChange(folder, package.files),) if staged != digest else (),
        folders=tuple(_missing_folders(overlay_root)),
        notes=tuple(notes),
    )


def unstage(overlay_root: str, vllm_root: str) -> OverlayChanges:
    """What `revert` on one vLLM writes: nothing unless the package is ours."""
    manifest, former = _manifest(overlay_root)
    folder = package_folder(overlay_root)
    if manifest is None:
        left = f"{folder} left in place: not put there by this tool"
        return OverlayChanges(notes=(left,) if os.path.isdir(folder) else ())
    trees = _users(manifest, vllm_root)
    path = _manifest_path(overlay_root)
    if trees:
        after = _encode(str(manifest.get("digest")), trees)
        note = f"{folder} left in place: {', '.join(trees)} uses it"
        return OverlayChanges(
            files=(FileChange(path, former, after),) if after != former else (), notes=(note,)
        )
    if os.path.realpath(folder) == package_folder(TOOL_ROOT):
        own = f"{folder} left in place: it is this tool's own"
        return OverlayChanges(files=(FileChange(path, former, None),), notes=(own,))
    if _is_volume(overlay_root, vllm_root):
        note = f"{folder} left in place: it is on a volume of its own, and another container's"
        note += f" {vllm_root} may use it; when none does: rm -r {shlex.quote(overlay_root)}/*"
        return OverlayChanges(notes=(note,))
    staged, ours = staged_digest(folder), manifest.get("digest")
    # An earlier build staged what is not staged any more, and counted it.
    if staged and ours != staged and ours != staged_digest(folder, unstaged=()):
        return OverlayChanges(notes=(f"{folder} left in place: changed since it was staged",))
    return OverlayChanges(
        files=(FileChange(path, former, None),),
        trees=(TreeChange(folder, None),) if staged else (),
        empty=(overlay_root,),
    )


def adopted(overlay_root: str, vllm_root: str) -> tuple[str, ...]:
    """What the overlay root holds for another vLLM than this, in just its present form.

    An interrupted run on this vLLM may have put it there; another run has built on it since.
    """
    digest = staged_digest(package_folder(overlay_root))
    manifest, _ = _manifest(overlay_root)
    if digest and any(_mentions(other, digest) for other in _users(manifest, vllm_root)):
        return package_folder(overlay_root), _manifest_path(overlay_root)
    return ()


def _users(manifest: Manifest | None, vllm_root: str) -> list[str]:
    """Patched vLLMs other than `vllm_root` that the manifest names."""
    named = (manifest or {}).get("trees", [])
    return [path for path in named if path != vllm_root and _mentions(path, "# >>> vision-exp:")]


def _mentions(vllm_root: str, word: str) -> bool:
    """Whether a target file of the vLLM has `word`, or cannot be asked."""
    for path in target_paths():
        try:
            data = read_file(os.path.join(vllm_root, path))
        except OSError:
            return True  # another user's: better left alone
        if data and word.encode() in data:
            return True
    return False


def _refuse_unsafe(overlay_root: str, vllm_root: str) -> None:
    unsafe = writable_by_others(overlay_root, vllm_root)
    if unsafe and os.path.islink(unsafe):
        there = os.path.exists(unsafe)
        raise environment(
            "overlay-link",
            f"{unsafe} is a link to {os.readlink(unsafe)}{'' if there else ', which is not there'}"
            "; vLLM would load whatever it leads to. Nothing was changed.",
            hint=f"--overlay-root {os.path.realpath(overlay_root)}"
            if there and unsafe == overlay_root
            else f"rm {unsafe}, then run this again; or use --overlay-root DIR",
        )
    if unsafe:
        raise environment(
            "overlay-unsafe",
            f"{unsafe} can be written by others than root, this user and the owner of vLLM, so "
            "what vLLM would load from there is theirs to choose. Nothing was changed.",
            hint=f"chmod go-w {unsafe} (and check its owner), or use --overlay-root DIR",
        )


def _is_volume(overlay_root: str, vllm_root: str) -> bool:
    """Whether a container's vLLM has its overlay on a mount, which other containers may share.

    Their trees have the same path as this one, so no note tells them apart.
    """
    vllm, overlay = mount_of(vllm_root), mount_of(overlay_root)
    return vllm != overlay and vllm[1] == "overlay"


def _missing_folders(folder: str) -> list[str]:
    missing: list[str] = []
    while not os.path.isdir(folder):
        missing.insert(0, folder)
        folder = os.path.dirname(folder)
    return missing


def _manifest_path(overlay_root: str) -> str:
    return os.path.join(overlay_root, f"{PACKAGE}.manifest.json")


def _encode(digest: str, trees: list[str]) -> bytes:
    content = {"tool": "vision-exp", "version": __version__, "digest": digest, "trees": trees}
    return (json.dumps(content, indent=1) + "\n").encode()


def _manifest(overlay_root: str) -> tuple[Manifest | None, bytes | None]:
    data = read_file(_manifest_path(overlay_root))
    if data is None:
        return None, None
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return None, data
    trees = content.get("trees") if isinstance(content, dict) else None
    listed = isinstance(trees, list) and all(isinstance(path, str) for path in trees)
    return (content if listed and content.get("tool") == "vision-exp" else None), data
