"""Target -> Source: the bytes of one target file, and the text they hold."""

from __future__ import annotations

import codecs
import os
import shlex
import stat
from dataclasses import dataclass

from anchors.errors import environment, refused
from anchors.sites import all_anchors

REINSTALL_HINT = "reinstall this vLLM, or use a container that has not been edited"


@dataclass(frozen=True)
class Source:
    """One target file: path relative to the package, and its bytes (None where there is none)."""

    path: str
    data: bytes | None


def target_paths() -> tuple[str, ...]:
    """Every file that has an anchor, relative to the package, in the order of the anchors."""
    return tuple(dict.fromkeys(anchor.file for anchor in all_anchors()))


def read(vllm_root: str, path: str) -> Source:
    """Reads a target file.

    Raises HotfixError: not a regular file, unreadable (6), a link that leads elsewhere (6).
    """
    full = os.path.join(vllm_root, path)
    try:
        real = os.path.realpath(full)
        if real != full:
            hint = "reinstall vLLM with copies (uv: --link-mode=copy), then run this again"
            root = real.removesuffix(f"/{path}")
            if root != real:  # as in a strict editable install
                root = shlex.quote(root)
                hint += f"; or, for all that link there: python3 hotfix.py --root {root} apply"
            raise environment(
                "target-is-link",
                f"{path} is a link to {real}, which other environments may use. "
                "Nothing was changed.",
                hint=hint,
            )
        if not stat.S_ISREG(os.stat(full).st_mode):
            raise refused(
                "target-not-a-file",
                f"{path} is not a regular file. Nothing was changed.",
                hint=REINSTALL_HINT,
                state="missing",
            )
        with open(full, "rb") as file:
            return Source(path, file.read())
    except (FileNotFoundError, NotADirectoryError):
        return Source(path, None)
    except PermissionError as error:
        raise environment(
            "target-unreadable",
            f"{path} cannot be read: {error.strerror}. Nothing was changed.",
            hint="run as the user that owns this vLLM",
        ) from error


def decode(path: str, data: bytes) -> str:
    """The text of a Python file, BOM taken off. Raises HotfixError (exit 3) for what is none."""
    if not data.strip():
        raise refused(
            "target-empty",
            f"{path} is empty, so this vLLM cannot work. Nothing was changed.",
            hint=REINSTALL_HINT,
            state="drifted",
        )
    try:
        text = data.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        raise refused(
            "target-not-utf8",
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}). "
            "Nothing was changed.",
            hint=REINSTALL_HINT,
            state="drifted",
        ) from error
    before, nul, _ = text.partition("\0")
    if nul:  # Python's own error names no line
        line = before.count("\n") + 1
        raise refused(
            "target-nul",
            f"{path} holds a NUL byte (line {line}), so this vLLM cannot work. "
            "Nothing was changed.",
            hint=REINSTALL_HINT,
            state="drifted",
        )
    return text
