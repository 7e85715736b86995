"""The lists of faults: every place is found once, and the day's sample of quick ones is noticed."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_results_of_several_runs_are_kept_until_a_fault_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(REPO / "bench"))
    import mutant_lists
    import mutants
    import reporting

    monkeypatch.setattr(mutant_lists, "LISTS", tmp_path)
    monkeypatch.setattr(reporting, "RESULTS", tmp_path)
    text = "@ a.py | t\n# one\n- x\n+ y\n# two\n- z\n# three\n- v\n"

    def saved(took: dict[str, float], missed: list[mutants.Fault]) -> dict[str, object]:
        mutants.save(took, missed)
        (path,) = tmp_path.glob("mutants-*.json")
        row: dict[str, object] = json.loads(path.read_text())["rooms"]["room"]
        del row["seconds"]
        return row

    (tmp_path / "room.txt").write_text(text)
    one, two, three = mutants.read()
    first = {"made": 3, "noticed": 1, "missed": ["two"], "not run": ["three"]}
    assert saved({one.mark: 1.0, two.mark: 2.0}, [two]) == first
    assert saved({three.mark: 1.0}, []) == {**first, "noticed": 2, "not run": []}
    assert saved({two.mark: 2.0}, []) == {**first, "noticed": 3, "missed": [], "not run": []}
    for changed in (text.replace("+ y", "+ w"), text.replace("# one", "! other\n# one")):
        (tmp_path / "room.txt").write_text(text)
        assert saved({one.mark: 1.0}, [])["not run"] == []
        (tmp_path / "room.txt").write_text(changed)
        assert saved({}, [])["not run"] == ["one"]
