from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import sources


@pytest.fixture(scope="session")
def libcst_wheels() -> Path:
    """LibCST and what it needs as wheel files for this Python, kept in the cache."""
    folder = sources.CACHE.parent / "wheels" / "libcst"
    if not list(folder.glob("libcst-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", str(folder), "libcst"], check=True, timeout=300)
    return folder
