"""Temporary folders in memory, for tests that write and sync thousands of files.

Nothing that they check depends on the disk: they break off writing at every step and look at what
is there then. On a disk each fsync takes milliseconds, which was most of their time. A conftest
that imports these fixtures has them instead of pytest's own; folders lie where pytest puts them
where there is no such file system, or little room in it.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")
ROOM = 2 << 30


class Folders:
    """Makes folders below one that ends with the session."""

    def __init__(self, base: Path) -> None:
        self.base = base

    def mktemp(self, basename: str, numbered: bool = True) -> Path:
        """A new folder, called like `basename`."""
        return Path(tempfile.mkdtemp(prefix=f"{basename}-", dir=self.base))


@pytest.fixture(scope="session")
def tmp_path_factory() -> Iterator[Folders]:
    fits = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM
    with tempfile.TemporaryDirectory(prefix="vision-exp-", dir=MEMORY if fits else None) as name:
        yield Folders(Path(name).resolve())


@pytest.fixture
def tmp_path(tmp_path_factory: Folders, request: pytest.FixtureRequest) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp(re.sub(r"\W", "_", request.node.name)[:30])
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
