"""A Job, which is paths and bytes: all new, or all old again."""

from __future__ import annotations

import errno
import os
import signal
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from anchors.digests import manifest_digest, read_file, read_package, sha256
from anchors.errors import BROKEN, ROLLED_BACK, HotfixError, unexpected
from anchors.writing import journal as journals
from anchors.writing import state
from anchors.writing.effects import Effects
from anchors.writing.journal import FileEntry, Journal, TreeEntry

_CAUSES = {
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EBUSY: "it is a mount point",
    errno.EXDEV: "it is on another file system than its folder",
}


@dataclass(frozen=True)
class FileChange:
    """A file to write (`after` None: to remove); `before` is what it holds (None: nothing)."""

    path: str
    before: bytes | None
    after: bytes | None


@dataclass(frozen=True)
class TreeChange:
    """A folder to put in place as a whole (`files` None: to take away)."""

    final: str
    files: Mapping[str, bytes] | None


@dataclass(frozen=True)
class Job:
    """Everything one run writes, in order: files, trees, caches to remove, records last."""

    vllm_root: str
    files: tuple[FileChange, ...]
    trees: tuple[TreeChange, ...] = ()
    caches: tuple[str, ...] = ()
    records: tuple[FileChange, ...] = ()
    folders: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()

    @property
    def changes(self) -> tuple[FileChange, ...]:
        """Every file that is written or removed, in order."""
        return (*self.files, *self.records)


def perform(job: Job, effects: Effects) -> None:
    """Does the whole job. The lock must be held.

    Raises HotfixError: rolled back (4), rollback failed (5), interrupted and rolled back (130).
    """
    journal = _journal(job)
    touched: set[str] = set()
    try:
        _prepare(job, journal, effects)
        _write(job, journal, effects, touched)
        for path in job.caches:
            (effects.remove_tree if os.path.isdir(path) else effects.remove)(path)
        for change, entry in zip(job.records, journal.files[len(job.files) :], strict=True):
            _put(change, entry, effects, touched)
        _read_back(job)
        journals.save(journals.committed(journal), job.vllm_root, effects)
    except BaseException as error:
        undone = journals.roll_back(journal, job.vllm_root, effects, touched=frozenset(touched))
        if undone.left and isinstance(error, Exception):
            raise explained(error, job.vllm_root, undone.left) from error
        raise
    journals.finish(journal, job.vllm_root, effects)


@contextmanager
def signals_held(effects: Effects) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP set a flag that the next step raises, so no step is torn."""

    def note(number: int, frame: FrameType | None) -> None:
        effects.interrupted = signal.Signals(number).name

    former = {
        number: signal.signal(number, note)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _journal(job: Job) -> Journal:
    run = os.urandom(4).hex()
    undo = state.undo_folder(job.vllm_root)
    files = []
    for number, change in enumerate(job.changes):
        folder, name = os.path.split(change.path)
        status = os.stat(change.path) if change.before is not None else None
        files.append(
            FileEntry(
                path=change.path,
                before=None if change.before is None else sha256(change.before),
                after=None if change.after is None else sha256(change.after),
                undo=None if change.before is None else os.path.join(undo, str(number)),
                temp=os.path.join(folder, f".{name}.vision-exp-{run}"),
                mode=stat.S_IMODE(status.st_mode) if status else 0o644,
                uid=status.st_uid if status else os.geteuid(),
                gid=status.st_gid if status else os.getegid(),
            )
        )
    trees = tuple(
        TreeEntry(
            final=tree.final,
            new=os.path.join(_beside(tree), f"{os.path.basename(tree.final)}.new-{run}"),
            old=os.path.join(_beside(tree), f"{os.path.basename(tree.final)}.old-{run}"),
            had=os.path.isdir(tree.final),
            remove=tree.files is None,
        )
        for tree in job.trees
    )
    beside = tuple(dict.fromkeys(_beside(tree) for tree in job.trees))
    folders = (*job.folders, *beside)
    return Journal(journals.WRITING, tuple(files), trees, folders, (*beside, *job.empty))


def _beside(tree: TreeChange) -> str:
    """Where a tree waits before it is put in place, and after it was replaced."""
    return state.folder(os.path.dirname(tree.final))


def _prepare(job: Job, journal: Journal, effects: Effects) -> None:
    """Old bytes and the journal first, then all new bytes beside their places."""
    undo = state.undo_folder(job.vllm_root)
    effects.remove_tree(undo)
    effects.make_folder(undo, 0o700)
    for change, entry in zip(job.changes, journal.files, strict=True):
        if entry.undo and change.before is not None:
            effects.write(entry.undo, change.before, 0o600)
    effects.sync_folder(undo)
    journals.save(journal, job.vllm_root, effects)
    for folder in journal.folders:
        if not os.path.isdir(folder):
            effects.make_folder(folder)
    for change, entry in zip(job.changes, journal.files, strict=True):
        if change.after is not None:
            effects.write(entry.temp, change.after, entry.mode, (entry.uid, entry.gid))
    for tree, place in zip(job.trees, journal.trees, strict=True):
        if tree.files is not None:
            _fill(place.new, tree.files, effects)


def _fill(folder: str, files: Mapping[str, bytes], effects: Effects) -> None:
    effects.make_folder(folder)
    for path, data in sorted(files.items()):
        place = folder
        for part in path.split("/")[:-1]:
            place = os.path.join(place, part)
            if not os.path.isdir(place):
                effects.make_folder(place)
        effects.write(os.path.join(folder, path), data)


def _write(job: Job, journal: Journal, effects: Effects, touched: set[str]) -> None:
    for change, entry in zip(job.files, journal.files, strict=False):
        _put(change, entry, effects, touched)
    for place in journal.trees:
        if place.had:
            effects.rename(place.final, place.old)
        if not place.remove:
            effects.rename(place.new, place.final)


def _put(change: FileChange, entry: FileEntry, effects: Effects, touched: set[str]) -> None:
    touched.add(entry.path)
    if change.after is None:
        effects.remove(entry.path)
        effects.sync_folder(os.path.dirname(entry.path))
    else:
        effects.rename(entry.temp, entry.path)


def _read_back(job: Job) -> None:
    for change in job.changes:
        if read_file(change.path) != change.after:
            raise OSError(errno.EIO, "reads back differently from what was written", change.path)
    for tree in job.trees:
        staged = read_package(tree.final) if os.path.isdir(tree.final) else None
        if (staged is None) != (tree.files is None) or (
            tree.files is not None and manifest_digest(staged or {}) != manifest_digest(tree.files)
        ):
            raise OSError(errno.EIO, "reads back differently from what was written", tree.final)


def explained(error: Exception, vllm_root: str, left: tuple[str, ...] = ()) -> HotfixError:
    """What a person is told when a run failed while writing and was rolled back (exit 4).

    `left` is what could not be cleared away. A fault of our own while rolling back is exit 5.
    """
    if isinstance(error, HotfixError):
        error.context = (*error.context, *left)
        return error
    undone = "Rolled back; this vLLM is as it was."
    if left:
        undone += " What could not be cleared away goes with the next run."
    if not isinstance(error, OSError):
        if state.is_interrupted(vllm_root) and not left:
            undone = "Not rolled back yet: do not start this vLLM, run this again first."
            return unexpected(error, undone, exit_code=BROKEN)
        return unexpected(error, undone, exit_code=ROLLED_BACK)
    cause = _CAUSES.get(error.errno or 0, error.strerror or str(error))
    return HotfixError(
        "write-failed",
        f"cannot write {error.filename or 'a file'}: {cause}. {undone}",
        exit_code=ROLLED_BACK,
        context=(repr(error), *left),
        hint="remove the cause, then: python3 hotfix.py apply",
    )
