"""One run at a time: advisory locks on a tree, and on an overlay root that trees share."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from anchors.errors import environment
from anchors.writing.effects import Effects

WAIT_S = 30.0
_PAUSE_S = 0.05
#: A file system without locks: NFS without its lock service, some FUSE ones.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def locked(path: str, effects: Effects, wait_s: float = WAIT_S) -> Iterator[None]:
    """Holds the lock at `path`.

    Raises HotfixError (exit 6) after `wait_s` seconds of waiting, or where there are no locks.
    """
    folder = os.path.dirname(path)
    refuse_not_ours([folder], [path])

    def opened() -> int:
        effects.before_step("lock", path)
        _make_folders(folder, [])
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    try:
        handle = _acquire(path, opened, time.monotonic() + wait_s)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _clear_away(path)
        raise environment(
            "no-locks",
            f"the file system of {folder} has no file locks ({error.strerror}), so another run "
            "could not be kept out. Nothing was changed.",
            hint="mount it with locks (NFS: without nolock), or install this vLLM on a local disk",
        ) from error
    try:
        yield
    finally:
        # Unlinked while held: whoever waits on this inode sees that the path is another.
        _clear_away(path, handle)
        os.close(handle)


def _clear_away(path: str, handle: int | None = None) -> None:
    """Removes the lock's file, if it is still `handle`'s, and its folder where that is empty.

    On a disk that fails an empty file may stay. It locks nothing, and must not hide how the run
    went.
    """
    with suppress(OSError):
        if handle is None or _same(handle, path):
            os.unlink(path)
        os.rmdir(os.path.dirname(path))


def refuse_not_ours(folders: Iterable[str], files: Iterable[str]) -> None:
    """Raises HotfixError (exit 6) where a name of ours is a link, or a folder where a file is due.

    Following a link would write, and clear away, where this tool has no business.
    """
    malformed = [path for path in files if os.path.islink(path) or os.path.isdir(path)]
    for path in folders:
        if os.path.islink(path) or (os.path.lexists(path) and not os.path.isdir(path)):
            malformed.append(path)
    for path in malformed:
        raise environment(
            "state-folder-not-ours",
            f"{path} is not what this tool makes there. Nothing was changed.",
            hint=f"look at it, remove it, then run this again: ls -ld {path}",
        )


@contextmanager
def folder_locked(
    folder: str, effects: Effects, wait_s: float = WAIT_S
) -> Iterator[tuple[str, ...]]:
    """Holds a folder that several vLLMs may share, made where it is missing.

    The lock is on the folder itself, so it needs no file in it and no right to write there.
    Yields the folders that were made; they go again if nothing is in them at the end.
    Raises HotfixError (exit 6) after `wait_s` seconds of waiting, OSError where the folder
    cannot be made or its file system has no locks for folders.
    """
    made: list[str] = []

    def opened() -> int:
        effects.before_step("lock", folder)
        _make_folders(folder, made)
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    try:
        handle = _acquire(folder, opened, time.monotonic() + wait_s)
        try:
            yield tuple(made)
        finally:
            os.close(handle)
    finally:
        with suppress(OSError):  # something is in it, which is what it was made for
            for path in reversed(made):
                os.rmdir(path)


def _make_folders(path: str, made: list[str]) -> None:
    """Makes a folder and those above it, to be written by this user alone; notes what it made."""
    if os.path.isdir(path):
        return
    _make_folders(os.path.dirname(path), made)
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
        return
    if path not in made:
        made.append(path)
    os.chmod(path, 0o755)  # whatever the umask


def wait_for_holder(path: str, wait_s: float = WAIT_S) -> bool:
    """Waits, without writing, while another run holds the lock at `path`; whether one did."""
    deadline = time.monotonic() + wait_s
    waited = False
    while time.monotonic() < deadline:
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return waited
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return waited
        except BlockingIOError:
            waited = True
            time.sleep(_PAUSE_S)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return waited  # nobody can hold it
        finally:
            os.close(handle)
    return waited


def _acquire(path: str, opened: Callable[[], int], deadline: float) -> int:
    while True:
        try:
            handle = opened()
        except FileNotFoundError:
            continue  # the run before ours took the folder away again
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same(handle, path):
                return handle
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(handle)
                raise environment(
                    "locked",
                    f"another run has held {path} for {WAIT_S:.0f} s. This one changed nothing.",
                    hint="wait for it, then run this again",
                ) from None
            time.sleep(_PAUSE_S)
        except OSError:
            os.close(handle)
            raise
        os.close(handle)


def _same(handle: int, path: str) -> bool:
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(handle), named)
