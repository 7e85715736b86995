"""One run at a time: an advisory lock on a file in the state folder."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from anchors.engine.effects import Effects
from anchors.engine.errors import environment

WAIT_S = 30.0
_PAUSE_S = 0.05


@contextmanager
def locked(path: str, effects: Effects, wait_s: float = WAIT_S) -> Iterator[None]:
    """Holds the lock at `path`. Raises HotfixError (exit 6) after `wait_s` seconds of waiting."""
    folder = os.path.dirname(path)
    if os.path.islink(folder) or os.path.isdir(path):
        raise environment(
            "state-folder-not-ours",
            f"{folder if os.path.islink(folder) else path} is not what this tool makes there. "
            "Nothing was changed.",
            hint=f"look at it, remove it, then run this again: ls -ld {folder}",
        )
    deadline = time.monotonic() + wait_s
    handle = _acquire(path, effects, deadline)
    try:
        yield
    finally:
        # Unlinked while held: whoever waits on this inode sees that the path is another one.
        os.unlink(path)
        if not os.listdir(os.path.dirname(path)):
            os.rmdir(os.path.dirname(path))
        os.close(handle)


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
        finally:
            os.close(handle)
    return waited


def _acquire(path: str, effects: Effects, deadline: float) -> int:
    while True:
        effects.before_step("lock", path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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
        os.close(handle)


def _same(handle: int, path: str) -> bool:
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(handle), named)
