"""A script of the tests in a plain Python of its own, which prints one line of results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]


def report(script: Path, *arguments: str, timeout: float) -> dict[str, Any]:
    """The JSON object after ``RESULT `` in what the script prints; there has to be just one."""
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), str(TESTS / "support")])
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == 1, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return found
