"""Drive `hotfix.py` on a private copy of a real release: in this process, or as a user does."""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import sources

REPO = Path(__file__).resolve().parents[2]
HOTFIX = REPO / "hotfix.py"


@dataclass(frozen=True)
class Answer:
    """What one run of the command line gave."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)

    @property
    def cause(self) -> str:
        """The first line of standard error, which is all that some launchers show."""
        return self.err.splitlines()[0] if self.err else ""


@dataclass(frozen=True)
class Rig:
    """One vLLM with its own overlay root, home and caches under `base`."""

    base: Path

    @property
    def site(self) -> Path:
        return self.base / "site"

    @property
    def root(self) -> Path:
        return self.site / "vllm"

    @property
    def overlay(self) -> Path:
        return self.base / "overlay"

    @property
    def home(self) -> Path:
        return self.base / "home"

    @property
    def cache(self) -> Path:
        return self.home / ".cache" / "vllm"

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "HOME": str(self.home)}

    def arguments(self, *words: str) -> list[str]:
        return ["--root", str(self.root), "--overlay-root", str(self.overlay), *words]

    def run(self, *words: str) -> Answer:
        """`hotfix.main` in this process: no start-up cost."""
        return call(self.arguments(*words), self.environment)

    def spawn(self, *words: str, before: Sequence[str] = (), **options: Any) -> Answer:
        """`python hotfix.py` as a process of its own, which the command `before` starts."""
        command = [*before, sys.executable, "-B", str(HOTFIX), *self.arguments(*words)]
        done = subprocess.run(
            command,
            env={**self.environment, **options.pop("env", {})},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=120,
            **options,
        )
        return Answer(done.returncode, done.stdout, done.stderr)


def make(base: Path, version: str) -> Rig:
    """A fresh rig: the needed files of this release as its wheel ships them."""
    rig = Rig(base)
    rig.home.mkdir(parents=True)
    sources.install(version, rig.site)
    return rig


def call(arguments: list[str], environment: dict[str, str]) -> Answer:
    import hotfix

    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = hotfix.main(arguments)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
    return Answer(int(code or 0), *texts)


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Relative path -> (mode, bytes) of every file and link below a folder."""
    found: dict[str, tuple[int, bytes]] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        name = str(path.relative_to(folder))
        if stat.S_ISLNK(status.st_mode):
            found[name] = (status.st_mode, str(path.readlink()).encode())
        elif stat.S_ISREG(status.st_mode):
            found[name] = (status.st_mode, path.read_bytes())
        elif not stat.S_ISDIR(status.st_mode):
            found[name] = (status.st_mode, b"")
    return found


def identity(folder: Path) -> dict[str, tuple[int, ...]]:
    """Relative path -> (inode, mode, owner, size, mtime): changes when anything is rewritten."""
    return {
        str(path.relative_to(folder)): (
            status.st_ino,
            status.st_mode,
            status.st_uid,
            status.st_gid,
            status.st_size if path.is_file() else 0,
            status.st_mtime_ns,
        )
        for path in sorted(folder.rglob("*"))
        for status in [path.lstat()]
    }
