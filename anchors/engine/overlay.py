"""The staged overlay: the package `vision_exp` under the overlay root, and who put it there."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from anchors import __version__
from anchors.digests import (
    TOOL_ROOT,
    manifest_digest,
    shipped_overlay,
    staged_digest,
    writable_by_others,
)
from anchors.errors import environment, refused
from anchors.sites import all_anchors
from anchors.writing.transaction import FileChange, TreeChange

Manifest = dict[str, Any]
DEFAULT_ROOT = "/opt/dspark-patches"
PACKAGE = "vision_exp"
ENVIRONMENT_NAME = "VISION_EXP_OVERLAY_ROOT"


@dataclass(frozen=True)
class Work:
    """What has to be written for the overlay, and notes for the person."""

    files: tuple[FileChange, ...] = ()
    trees: tuple[TreeChange, ...] = ()
    folders: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def requested_root(option: str | None) -> str | None:
    """The overlay root asked for by option or environment, absolute; None where neither is."""
    root = option or os.environ.get(ENVIRONMENT_NAME)
    return os.path.abspath(os.path.expanduser(root)) if root else None


def package_of(root: str) -> str:
    """The staged package's folder."""
    return os.path.join(root, PACKAGE)


def source_files() -> dict[str, bytes]:
    """The overlay as this tool ships it. Raises HotfixError (exit 6) if it is not there."""
    files = shipped_overlay()
    if "__init__.py" not in files:
        raise environment(
            "no-overlay-source",
            f"{os.path.join(TOOL_ROOT, PACKAGE)} is missing: this copy of vision-exp is not "
            "complete. Nothing was changed.",
            hint="copy the whole folder again, then: bash run.sh",
        )
    return files


def source_digest() -> str:
    """Manifest digest of the overlay as this tool ships it."""
    return manifest_digest(source_files())


def state_of(root: str, wanted: str) -> str:
    """`staged`, `missing`, `different`, or `unsafe` where others could write it."""
    staged = staged_digest(package_of(root))
    if staged is None:
        return "missing"
    if writable_by_others(root):
        return "unsafe"
    return "staged" if staged == wanted else "different"


def staging(root: str, tree: str) -> Work:
    """What `apply` on the vLLM at `tree` writes.

    Raises HotfixError: a package of somebody else in the place (3), writable by others (6).
    """
    files = source_files()
    digest = manifest_digest(files)
    folder, manifest_path = package_of(root), _manifest_path(root)
    manifest, former = _manifest(root)
    staged = staged_digest(folder)
    _refuse_unsafe(root)
    in_the_way = os.path.lexists(folder) and not os.path.isdir(folder)
    if in_the_way or (os.path.isdir(folder) and manifest is None and staged != digest):
        raise refused(
            "overlay-foreign",
            f"{folder} exists and was not put there by this tool. Nothing was changed.",
            hint="move it away, or choose another place: --overlay-root DIR",
            state="foreign",
        )
    others = _users(manifest, tree)
    after = _encode(digest, sorted({*others, tree}))
    behind = [other for other in others if not _mentions(other, digest)]
    notes = (
        f"{path} was patched for another overlay than the one in {folder} now: it refuses vision "
        f"checkpoints until `python3 hotfix.py --root {path} apply`"
        for path in behind
    )
    return Work(
        files=(FileChange(manifest_path, former, after),) if former != after else (),
        trees=(TreeChange(folder, files),) if staged != digest else (),
        folders=tuple(_missing_folders(root)),
        notes=tuple(notes),
    )


def removal(root: str, tree: str) -> Work:
    """What `revert` on the vLLM at `tree` writes: nothing unless the package is ours."""
    manifest, former = _manifest(root)
    folder = package_of(root)
    if manifest is None:
        left = f"{folder} left in place: not put there by this tool"
        return Work(notes=(left,) if os.path.isdir(folder) else ())
    trees = _users(manifest, tree)
    path = _manifest_path(root)
    if trees:
        after = _encode(str(manifest.get("digest")), trees)
        note = f"{folder} left in place: {', '.join(trees)} uses it"
        return Work(
            files=(FileChange(path, former, after),) if after != former else (), notes=(note,)
        )
    if os.path.realpath(folder) == os.path.join(TOOL_ROOT, PACKAGE):
        own = f"{folder} left in place: it is this tool's own"
        return Work(files=(FileChange(path, former, None),), notes=(own,))
    staged, ours = staged_digest(folder), manifest.get("digest")
    # An earlier build staged what is not staged any more, and counted it.
    if staged and ours != staged and ours != staged_digest(folder, unstaged=()):
        return Work(notes=(f"{folder} left in place: changed since it was staged",))
    return Work(
        files=(FileChange(path, former, None),),
        trees=(TreeChange(folder, None),) if staged else (),
        empty=(root,),
    )


def adopted(root: str, tree: str) -> tuple[str, ...]:
    """What the overlay root holds for another vLLM than `tree`, in just its present form.

    An interrupted run on `tree` may have put it there; another run has built on it since.
    """
    digest = staged_digest(package_of(root))
    manifest, _ = _manifest(root)
    if digest and any(_mentions(other, digest) for other in _users(manifest, tree)):
        return package_of(root), _manifest_path(root)
    return ()


def _users(manifest: Manifest | None, tree: str) -> list[str]:
    """Patched vLLMs other than `tree` that the manifest names."""
    named = (manifest or {}).get("trees", [])
    return [path for path in named if path != tree and _mentions(path, "# >>> vision-exp:")]


def _mentions(tree: str, word: str) -> bool:
    """Whether a target file of the vLLM at `tree` has `word`, or cannot be asked."""
    for path in dict.fromkeys(anchor.file for anchor in all_anchors()):
        try:
            with open(os.path.join(tree, path), "rb") as file:
                if word.encode() in file.read():
                    return True
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return True  # another user's: better left alone
    return False


def _refuse_unsafe(root: str) -> None:
    unsafe = writable_by_others(root)
    if unsafe and os.path.islink(unsafe):
        there = os.path.exists(unsafe)
        raise environment(
            "overlay-link",
            f"{unsafe} is a link to {os.readlink(unsafe)}{'' if there else ', which is not there'}"
            "; vLLM would load whatever it leads to. Nothing was changed.",
            hint=f"--overlay-root {os.path.realpath(root)}"
            if there and unsafe == root
            else f"rm {unsafe}, then run this again; or use --overlay-root DIR",
        )
    if unsafe:
        raise environment(
            "overlay-unsafe",
            f"{unsafe} can be written by others than root and this user, so what vLLM would load "
            "from there is theirs to choose. Nothing was changed.",
            hint=f"chmod go-w {unsafe} (and check its owner), or use --overlay-root DIR",
        )


def _missing_folders(root: str) -> list[str]:
    missing: list[str] = []
    while not os.path.isdir(root):
        missing.insert(0, root)
        root = os.path.dirname(root)
    return missing


def _manifest_path(root: str) -> str:
    return os.path.join(root, f"{PACKAGE}.manifest.json")


def _encode(digest: str, trees: list[str]) -> bytes:
    content = {"tool": "vision-exp", "version": __version__, "digest": digest, "trees": trees}
    return (json.dumps(content, indent=1) + "\n").encode()


def _manifest(root: str) -> tuple[Manifest | None, bytes | None]:
    try:
        with open(_manifest_path(root), "rb") as file:
            data = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None, None
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return None, data
    trees = content.get("trees") if isinstance(content, dict) else None
    listed = isinstance(trees, list) and all(isinstance(path, str) for path in trees)
    return (content if listed and content.get("tool") == "vision-exp" else None), data
