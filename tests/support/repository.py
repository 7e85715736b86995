"""The files that belong to this repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def tracked() -> list[Path]:
    """Files of the repository: from git where there is one, else all that is not a dotfile."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        return [ROOT / name for name in listed.stdout.split("\0") if name]
    names = (path for path in ROOT.rglob("*") if path.is_file())
    return [p for p in names if not any(part[0] == "." for part in p.relative_to(ROOT).parts)]
