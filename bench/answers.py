"""Prints what a checkpoint that sees answered, as a table in Markdown.

    python bench/answers.py ROWS

ROWS is the folder with sees_*.json that `tests/gpu/run.sh sees` leaves (WORK/rows), or one file of
rows such as those in bench/results. Exit code 1 if a check failed or there is no row of this kind.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

MARKS = {True: "ok", False: "**FAIL**", None: ""}


def rows_in(path: Path) -> list[dict]:
    """Rows of one file, or of all sees_*.json in a folder. ValueError for other contents."""
    files = sorted(path.glob("sees_*.json")) if path.is_dir() else [path]
    rows: list[dict] = []
    for file in files:
        found = json.loads(file.read_text())
        if not isinstance(found, list) or any("detail" not in row for row in found):
            raise ValueError(f"{file} holds no rows of checks")
        rows += found
    if not rows:
        raise ValueError(f"{path} holds no sees_*.json with rows")
    return rows


def table(rows: Sequence[dict]) -> str:
    lines = ["| asked | answered | |", "|---|---|---|"]
    for row in rows:
        detail = row["detail"].replace("|", "/")
        lines.append(f"| {row['name']} | {detail} | {MARKS[row['ok']]} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("one folder or file of rows is wanted; next: python bench/answers.py WORK/rows")
        return 2
    try:
        rows = rows_in(Path(arguments[0]))
    except (OSError, ValueError) as error:
        print(f"nothing to print: {error}; next: tests/gpu/run.sh sees", file=sys.stderr)
        return 1
    print(table(rows))
    return 1 if any(row["ok"] is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
