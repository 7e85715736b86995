"""Programs that tests use where the distribution has them."""

from __future__ import annotations

import os
import shutil
import subprocess


def program(*names: str) -> str | None:
    """The first of these programs that is here, else the first one's package by apt, else None."""
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "-qq", "update"], check=False, capture_output=True)
        command = ["apt-get", "-qq", "-y", "--no-install-recommends", "install", names[0]]
        subprocess.run(command, check=False, capture_output=True)
        found = shutil.which(names[0])
    return found
