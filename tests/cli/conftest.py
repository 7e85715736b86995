from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import hotfix_rig
import pytest
import sources
from hotfix_rig import Rig
from memory_folders import tmp_path, tmp_path_factory

__all__ = ["tmp_path", "tmp_path_factory"]


@pytest.fixture(scope="session")
def libcst_wheels() -> Path:
    """LibCST and what it needs as wheel files for this Python, kept in the cache."""
    folder = sources.CACHE.parent / "wheels" / "libcst"
    if not list(folder.glob("libcst-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", str(folder), "libcst"], check=True, timeout=300)
    return folder


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """A real vLLM without the hotfix."""
    return hotfix_rig.make(tmp_path / "rig", "0.29.0")


@pytest.fixture
def applied(rig: Rig) -> Rig:
    """The same with it."""
    assert rig.run("apply").code == 0
    return rig
