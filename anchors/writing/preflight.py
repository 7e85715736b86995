"""Proves write access everywhere before the first write, so that most failures cost nothing."""

from __future__ import annotations

import os
import re

from anchors.errors import environment
from anchors.writing import state
from anchors.writing.lock import refuse_not_ours
from anchors.writing.transaction import Job

_SPARE = 1 << 20
_BAKE = "bake it into the image: the Dockerfile of this folder, or this command in yours"


def check(job: Job) -> None:
    """Raises HotfixError (exit 6) naming the first place that cannot be written."""
    root = job.vllm_root
    beside = (state.folder(os.path.dirname(tree.final)) for tree in job.trees)
    own = (state.folder(root), state.undo_folder(root), state.originals_folder(root))
    refuse_not_ours([*own, *beside], [state.lock_path(root)])
    mounts = mount_points()
    for change in job.changes:
        if change.path in mounts:
            raise environment(
                "target-is-mount",
                f"{change.path} is a mount point and cannot be replaced. Nothing was changed.",
                hint="take the bind mount out of the container's options; this tool replaces it",
            )
        if change.before is not None and os.geteuid() != 0:
            owner = os.stat(change.path).st_uid
            if owner != os.geteuid():
                raise environment(
                    "not-owner",
                    f"{change.path} belongs to user {owner}; its owner could not be kept. "
                    "Nothing was changed.",
                    hint=f"run as root or as user {owner}; where you can be neither, {_BAKE}",
                )
    places = {os.path.dirname(change.path) for change in job.changes}
    places |= {os.path.dirname(tree.final) for tree in job.trees}
    places |= {root, state.folder(root)}
    for place in sorted(places):
        _writable(place)
    _has_space(job)


def mount_points() -> frozenset[str]:
    """Paths something is mounted on, as this process sees them."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            fields = [line.split(" ")[4] for line in file]
    except OSError:
        return frozenset()
    return frozenset(
        re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), path) for path in fields
    )


def _existing(place: str) -> str:
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    return place


def _writable(place: str) -> None:
    existing = _existing(place)
    if not os.path.isdir(existing):
        raise environment(
            "not-a-folder",
            f"{existing} is in the way: not a folder. Nothing was changed.",
            hint=f"move {existing} away, or use --overlay-root DIR",
        )
    if os.access(existing, os.W_OK | os.X_OK):
        return
    read_only = bool(os.statvfs(existing).f_flag & os.ST_RDONLY)
    cause = "the file system is read-only" if read_only else "no permission"
    hint = _BAKE if read_only else f"run as root, or name another --overlay-root; else {_BAKE}"
    raise environment(
        "not-writable",
        f"cannot write in {existing}: {cause}. Nothing was changed.",
        hint=hint,
    )


def _has_space(job: Job) -> None:
    needed: dict[str, int] = {}
    for change in job.changes:
        size = len(change.after or b"") + len(change.before or b"")
        place = _existing(os.path.dirname(change.path))
        needed[place] = needed.get(place, 0) + size
    for tree in job.trees:
        place = _existing(os.path.dirname(tree.final))
        needed[place] = needed.get(place, 0) + sum(map(len, (tree.files or {}).values()))
    for place, size in needed.items():
        status = os.statvfs(place)
        if status.f_bavail * status.f_frsize < size + _SPARE:
            raise environment(
                "disk-full",
                f"no space left for {size + _SPARE} bytes in {place}. Nothing was changed.",
                hint="free some space, then run this again",
            )
