"""The staged overlay: the package `vision_exp` under the overlay root, and who put it there."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from anchors import __version__
from anchors.engine.digests import (
    TOOL_ROOT,
    manifest_digest,
    read_package,
    staged_digest,
    writable_by_others,
)
from anchors.engine.errors import environment, refused
from anchors.engine.transaction import FileChange, TreeChange

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
    return os.path.abspath(root) if root else None


def package_of(root: str) -> str:
    """The staged package's folder."""
    return os.path.join(root, PACKAGE)


def source_files() -> dict[str, bytes]:
    """The package as this tool ships it. Raises HotfixError (exit 6) if it is not there."""
    files = read_package(os.path.join(TOOL_ROOT, PACKAGE))
    if "__init__.py" not in files:
        raise environment(
            "no-overlay-source",
            f"{os.path.join(TOOL_ROOT, PACKAGE)} is missing: this copy of vision-exp is not "
            "complete. Nothing was changed.",
            hint="copy the whole folder again, then: bash run.sh",
        )
    return files


def source_digest() -> str:
    """Manifest digest of the package as this tool ships it."""
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
    if os.path.lexists(folder) and manifest is None and staged != digest:
        raise refused(
            "overlay-foreign",
            f"{folder} exists and was not put there by this tool. Nothing was changed.",
            hint="move it away, or choose another place: --overlay-root DIR",
            state="foreign",
        )
    trees = sorted({*(manifest or {}).get("trees", ()), tree})
    after = _encode(digest, trees)
    return Work(
        files=(FileChange(manifest_path, former, after),) if former != after else (),
        trees=(TreeChange(folder, files),) if staged != digest else (),
        folders=tuple(_missing_folders(root)),
    )


def removal(root: str, tree: str) -> Work:
    """What `revert` on the vLLM at `tree` writes: nothing unless the package is ours."""
    manifest, former = _manifest(root)
    folder = package_of(root)
    if manifest is None:
        left = f"{folder} left in place: not put there by this tool"
        return Work(notes=(left,) if os.path.isdir(folder) else ())
    trees = [path for path in manifest.get("trees", ()) if path != tree and os.path.isdir(path)]
    path = _manifest_path(root)
    if trees:
        after = _encode(str(manifest.get("digest")), trees)
        note = f"{folder} left in place: {', '.join(trees)} uses it"
        return Work(
            files=(FileChange(path, former, after),) if after != former else (), notes=(note,)
        )
    staged = staged_digest(folder)
    if staged not in (None, manifest.get("digest")):
        return Work(notes=(f"{folder} left in place: changed since it was staged",))
    return Work(
        files=(FileChange(path, former, None),),
        trees=(TreeChange(folder, None),) if staged else (),
        empty=(root,),
    )


def _refuse_unsafe(root: str) -> None:
    unsafe = writable_by_others(root)
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


def _manifest(root: str) -> tuple[dict[str, list[str]] | None, bytes | None]:
    try:
        with open(_manifest_path(root), "rb") as file:
            data = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None, None
    try:
        content = json.loads(data)
    except ValueError:
        return None, data
    ours = isinstance(content, dict) and content.get("tool") == "vision-exp"
    return (content if ours else None), data
