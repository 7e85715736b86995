"""The lists of faults: every place is found once, and the day's sample of quick ones is noticed."""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, str(REPO / "bench" / "mutants.py")]
QUICK = r"layout\.py|fences|versions|plan\.py|writing/|support\.py|visibility/spans|engine/spans"


def mutants(*words: str) -> str:
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_place_is_found_once() -> None:
    count = int(mutants("--check").split()[0])
    assert count >= 200


def test_the_days_sample_is_noticed() -> None:
    date = datetime.date.today().isoformat()
    found = mutants("--sample", "5", "--date", date, "--only", QUICK, "--limit", "60")
    assert found.count("\nnoticed ") + found.startswith("noticed ") == 5, found
