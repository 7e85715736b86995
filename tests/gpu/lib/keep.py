"""Keeps the rows of finished GPU runs in bench/results/, dated.

    keep.py NAME CARD RUN=FOLDER...
    keep.py NAME CARD RUN=FILE.json...

FOLDER holds the reports of one run (``rows/`` of ``run.sh``); RUN says in words what ran. Of two
runs with the same words the later folder's reports replace the earlier one's. FILE is one run's
figures, as bench/gpu_tower.py writes them.
"""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results"


def gather(runs: list[str]) -> list[dict]:
    """All rows, each with its run and its check's name."""
    reports: dict[tuple[str, str], list[dict]] = {}
    for entry in runs:
        run, _, folder = entry.partition("=")
        for path in sorted(Path(folder).glob("*.json")):
            rows = json.loads(path.read_text())
            if isinstance(rows, list):
                reports[run, path.stem] = rows
    return [
        {"run": run, "check": check, **row}
        for (run, check), rows in reports.items()
        for row in rows
    ]


def main(name: str, card: str, *runs: str) -> int:
    today = datetime.date.today().isoformat()
    out = RESULTS / f"{name}-{today}.json"
    kept: dict = {"date": today, "card": card}
    if all(run.endswith(".json") for run in runs):
        files = [run.partition("=") for run in runs]
        kept["runs"] = [
            {"run": run, **json.loads(Path(path).read_text())} for run, _, path in files
        ]
    else:
        kept["rows"] = gather(list(runs))
    out.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"{len(kept.get('rows', kept.get('runs')))} rows in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
