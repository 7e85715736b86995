"""The three digests that decide whether anything changed: bytes, a folder, this tool."""

from __future__ import annotations

import hashlib
import os

from anchors import UNSTAGED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

TOOL_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def sha256(data: bytes) -> str:
    """Hex digest of `data`."""
    return hashlib.sha256(data).hexdigest()


def read_file(path: str) -> bytes | None:
    """The bytes of a file, None where there is none."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None


def file_digest(path: str) -> str | None:
    """Hex digest of a file, None where there is none. A pipe or a device is never opened."""
    data = read_file(path) if os.path.isfile(path) else None
    return None if data is None else sha256(data)


def package_files(folder: str) -> list[str]:
    """Sorted relative POSIX paths of a package's files, without byte code and dotfiles."""
    found = []
    for base, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__" and name[0] != "."]
        inside = _inside(base, folder)
        found += [inside + name for name in names if name[0] != "." and not name.endswith(".pyc")]
    return sorted(found)


def _inside(base: str, folder: str) -> str:
    """The POSIX path from `folder` to `base` below it, with a slash behind it; "" for itself."""
    path = os.path.relpath(base, folder).replace(os.sep, "/")
    return "" if path == "." else path + "/"


def manifest_digest(files: Mapping[str, bytes]) -> str:
    """Digest over sorted relative paths and bytes; the injected hook computes the same."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path}\0{len(files[path])}\0".encode())
        digest.update(files[path])
    return digest.hexdigest()


def read_package(folder: str) -> dict[str, bytes]:
    """Relative path -> bytes of the package's files; empty where there is no folder."""
    files = {}
    for path in package_files(folder):
        with open(os.path.join(folder, path), "rb") as file:
            files[path] = file.read()
    return files


def staged_digest(folder: str, unstaged: tuple[str, ...] = UNSTAGED) -> str | None:
    """Digest of a staged package over every file but `__pycache__`; None where absent.

    Nor over what is `unstaged`: it lies there where the overlay root is a whole copy of this tool,
    and the hook passes it over as well. A link that leads nowhere, a pipe or a device is not what
    was staged, and never opened.
    """
    files = {}
    for base, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        inside = _inside(base, folder)
        for name in names:
            path = os.path.join(base, name)
            data = b"\0not a file\0"
            if os.path.isfile(path):
                with open(path, "rb") as file:
                    data = file.read()
            files[inside + name] = data
    files = {path: data for path, data in files.items() if path.split("/")[0] not in unstaged}
    return manifest_digest(files) if files else None


def tool_digest() -> str:
    """Digest of this tool's own code: `hotfix.py` and everything under `anchors/`."""
    files = {
        f"anchors/{path}": data
        for path, data in read_package(os.path.join(TOOL_ROOT, "anchors")).items()
        if path.endswith(".py")
    }
    with open(os.path.join(TOOL_ROOT, "hotfix.py"), "rb") as file:
        files["hotfix.py"] = file.read()
    return manifest_digest(files)


def writable_by_others(overlay_root: str) -> str | None:
    """The first of an overlay root and all in its package that somebody else could write.

    Somebody else is anyone but root and the current user.
    """
    folder = os.path.join(overlay_root, "vision_exp")
    places = [overlay_root, folder]
    for base, folders, names in os.walk(folder):
        places += [os.path.join(base, name) for name in (*folders, *names)]
    for place in places:
        try:
            status = os.lstat(place)
        except (FileNotFoundError, NotADirectoryError):
            continue
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            return place
    return None
