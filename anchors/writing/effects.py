"""Every change to a file system goes through here, one step at a time."""

from __future__ import annotations

import errno
import os
import shutil

from anchors.errors import INTERRUPTED, HotfixError

PART = ".part"  # ends the name of a folder that is still being copied


class Effects:
    """The file system. `before_step` runs ahead of every change; tests make it fail at step N.

    `interrupted` is set by a signal handler and raised at the next step, never in the middle
    of one; with `may_stop` off, as while rolling back, a second Ctrl-C changes nothing.
    """

    def __init__(self) -> None:
        self.interrupted = ""
        self.may_stop = True

    def before_step(self, what: str, path: str) -> None:
        """Raises HotfixError (exit 130) when a signal asked to stop."""
        if self.interrupted and self.may_stop:
            raise HotfixError(
                "interrupted",
                f"interrupted by {self.interrupted}; rolled back, this vLLM is as it was.",
                exit_code=INTERRUPTED,
                hint="python3 hotfix.py apply",
            )

    def make_folder(self, path: str, mode: int = 0o755) -> None:
        """Creates one folder with exactly `mode`, whatever the umask."""
        self.before_step("mkdir", path)
        os.mkdir(path)
        os.chmod(path, mode)

    def write(
        self, path: str, data: bytes, mode: int = 0o644, owner: tuple[int, int] | None = None
    ) -> None:
        """Writes a new file to the disk itself, with `mode` and `owner` (uid, gid)."""
        self.before_step("write", path)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            with open(handle, "wb") as file:
                file.write(data)
                file.flush()
                if owner and owner != (os.geteuid(), os.getegid()):
                    _give(handle, owner)
                os.fchmod(handle, mode)
                os.fsync(handle)
        except OSError as error:
            error.filename = path  # what fails on a handle names no file
            raise

    def rename(self, old: str, new: str) -> None:
        """Puts `old` in the place of `new` in one step."""
        self.before_step("rename", new)
        try:
            os.rename(old, new)
        except OSError as error:
            if error.errno != errno.EXDEV or not os.path.isdir(old):
                raise
            self._move_across(old, new)
        self.sync_folder(os.path.dirname(new))

    def _move_across(self, old: str, new: str) -> None:
        """Moves a folder of a lower overlayfs layer, as of an image, which has no rename for it.

        `new` is complete before anything of `old` goes, so that a rollback finds it whole.
        """
        waiting = new + PART
        self.remove_tree(waiting)
        self.before_step("copy-tree", waiting)
        shutil.copytree(old, waiting, symlinks=True)
        self.before_step("rename", new)
        os.rename(waiting, new)
        self.remove_tree(old)

    def remove(self, path: str) -> None:
        """Removes a file that may be gone already."""
        if os.path.lexists(path):
            self.before_step("remove", path)
            os.unlink(path)

    def remove_tree(self, path: str) -> None:
        """Removes a folder with everything in it; one that is gone already is fine."""
        if os.path.isdir(path) and not os.path.islink(path):
            self.before_step("remove-tree", path)
            shutil.rmtree(path)

    def remove_folder_if_empty(self, path: str) -> None:
        """Removes a folder unless something is in it."""
        if os.path.isdir(path) and not os.listdir(path):
            self.before_step("rmdir", path)
            os.rmdir(path)

    def sync_folder(self, path: str) -> None:
        """Makes the names in a folder survive a power cut."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _give(handle: int, owner: tuple[int, int]) -> None:
    try:
        os.fchown(handle, *owner)
    except PermissionError as error:
        who = f"the old file's owner {owner[0]}:{owner[1]} cannot be kept; run as that user or root"
        raise PermissionError(error.errno, f"{error.strerror} ({who})") from error
