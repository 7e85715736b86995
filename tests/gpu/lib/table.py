"""Prints the rows of all reports as one table.

    table.py FOLDER NAME...

Exit 1 if a row failed, a report is missing, or a job did not end well: FOLDER/JOB.failed says why.
A job that dies after its first rows leaves a report that looks whole.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(folder: str, *names: str) -> int:
    failed = 0
    counts = {"ok": 0, "FAIL": 0, "info": 0, "NOT RUN": 0}
    for path in sorted(Path(folder).glob("*.failed")):
        counts["FAIL"] += 1
        failed += 1
        print(f"FAIL     job {path.stem}: {path.read_text().strip()}")
    for name in names:
        path = Path(folder) / f"{name}.json"
        rows = json.loads(path.read_text()) if path.exists() else []
        if not rows:
            counts["NOT RUN"] += 1
            print(f"NOT RUN  {name}: {'no row in its report' if path.exists() else 'no report'}")
            failed += 1
        for row in rows:
            mark = {True: "ok", False: "FAIL", None: "info"}[row["ok"]]
            counts[mark] += 1
            failed += row["ok"] is False
            print(f"{mark:7}  {row['name']}  ({row['seconds']} s)\n         {row['detail']}")
    print(", ".join(f"{count} {mark}" for mark, count in counts.items()))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
