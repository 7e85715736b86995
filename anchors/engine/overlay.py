"""The overlay: the package `vision_exp` as this tool ships it, and as an overlay root holds it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from anchors.digests import TOOL_ROOT, manifest_digest, staged_digest, writable_by_others
from anchors.engine.fast import PACKAGE
from anchors.errors import environment

_SYSTEM_ROOT = "/opt/dspark-patches"


@dataclass(frozen=True)
class Package:
    """The shipped overlay, read once per run: relative path -> bytes, and the manifest digest."""

    files: Mapping[str, bytes]
    digest: str


def package(files: Mapping[str, bytes]) -> Package:
    """What `fast.read_shipped` read, as a value. Raises HotfixError (exit 6) if it is not there."""
    if "__init__.py" not in files:
        raise environment(
            "no-overlay-source",
            f"{package_folder(TOOL_ROOT)} is missing: this copy of vision-exp is not "
            "complete. Nothing was changed.",
            hint="copy the whole folder again, then: bash run.sh",
        )
    return Package(files, manifest_digest(files))


def default_root(vllm_root: str) -> str:
    """Where the overlay goes if nobody says: the folder that existing recipes expect.

    For a user who may write in the environment and not there, a folder beside the vLLM package.
    """
    place, site = _SYSTEM_ROOT, os.path.dirname(vllm_root)
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    own = _may_write(site) and not _may_write(place)
    return os.path.join(site, os.path.basename(_SYSTEM_ROOT)) if own else _SYSTEM_ROOT


def _may_write(folder: str) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)


def package_folder(overlay_root: str) -> str:
    """The package's folder in an overlay root; this tool's own folder is one too."""
    return os.path.join(overlay_root, PACKAGE)


def state_of(overlay_root: str, vllm_root: str, wanted: str) -> str:
    """`staged`, `missing`, `different`, or `unsafe` where others could write it."""
    staged = staged_digest(package_folder(overlay_root))
    if staged is None:
        return "missing"
    if writable_by_others(overlay_root, vllm_root):
        return "unsafe"
    return "staged" if staged == wanted else "different"
