"""The bundle, made once, and unpacked as a launcher does."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
MOD = "deepseek-v4-vision-exp"


def make(target: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPO / "hotfix.py"), "bundle", str(target), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("bundle") / f"{MOD}.zip"
    done = make(target)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def mod(bundle: Path, tmp_path: Path) -> Path:
    """The bundle unpacked without mode bits, as `zipfile` does it."""
    folder = tmp_path / "workspace" / "mods" / MOD
    with zipfile.ZipFile(bundle) as archive:
        archive.extractall(folder)
    return folder
