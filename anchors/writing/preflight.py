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
    return frozenset(path for path, _ in _mounts())


def mount_of(path: str) -> tuple[str, str]:
    """(mount point, file system's type) that holds an existing or future path; ("", "") unknown."""
    real = os.path.realpath(path)
    above = ("", "")
    for mount in _mounts():  # of two on one point the later covers the earlier
        inside = os.path.commonpath((real, mount[0])) == mount[0]
        if inside and len(mount[0]) >= len(above[0]):
            above = mount
    return above


def _mounts() -> list[tuple[str, str]]:
    """(mount point, type) of every line of mountinfo, see `man 5 proc_pid_mountinfo`."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            lines = [line.partition(" - ") for line in file]
    except OSError:
        return []
    return [
        (
            re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), left.split(" ")[4]),
            right.split(" ")[0],
        )
        for left, _, right in lines
    ]


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
    """New and old bytes of all that is changed must fit, by file system."""
    needed: dict[int, int] = {}
    places: dict[int, str] = {}

    def need(path: str, size: int) -> None:
        place = _existing(os.path.dirname(path))
        device = os.stat(place).st_dev
        places.setdefault(device, place)
        needed[device] = needed.get(device, _SPARE) + size

    for change in job.changes:
        need(change.path, len(change.after or b""))
        need(state.undo_folder(job.vllm_root), len(change.before or b""))
    for tree in job.trees:
        need(tree.final, sum(map(len, (tree.files or {}).values())))
    for device, size in needed.items():
        status = os.statvfs(places[device])
        if status.f_bavail * status.f_frsize < size:
            raise environment(
                "disk-full",
                f"no space left for {size} bytes in {places[device]}. Nothing was changed.",
                hint="free some space, then run this again",
            )
