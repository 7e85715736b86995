"""Every shell script passes shellcheck."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*REPO.glob("*.sh"), *REPO.glob("tests/**/*.sh"), REPO / ".ci" / "run"])


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(REPO)))
def test_shellcheck_finds_nothing(path: Path) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    child = subprocess.run([shellcheck, str(path)], capture_output=True, text=True)
    assert child.returncode == 0, child.stdout
