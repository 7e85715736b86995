"""Time and downloads of `hotfix.py drift` over every release: `python bench/drift.py`.

The first run starts from an empty cache, the second finds everything in it. Downloaded bytes are
what the process reads from its sockets: headers and bodies of all answers, without what TLS adds.
Exit code 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from reporting import RESULTS, machine

HOTFIX = Path(__file__).resolve().parent.parent / "hotfix.py"
LIMITS = {"cold_s": 60.0, "cold_mb": 60.0, "cached_s": 5.0}


def counted(report: Path) -> None:
    """In a child: run drift, write the number of bytes that were read from sockets."""
    read = socket.SocketIO.readinto
    total = 0

    def readinto(self: socket.SocketIO, buffer: Any) -> int | None:
        nonlocal total
        count = read(self, buffer)
        total += count or 0
        return count

    socket.SocketIO.readinto = readinto  # type: ignore[method-assign]
    sys.path[0] = str(HOTFIX.parent)
    sys.argv = [str(HOTFIX), "--json", "drift"]
    try:
        runpy.run_path(str(HOTFIX), run_name="__main__")
    finally:
        report.write_text(str(total))


def measure(cache: Path) -> tuple[float, int, dict[str, Any]]:
    """(seconds, bytes, result) of one run as a user starts it."""
    report = cache / "bytes"
    command = [sys.executable, str(Path(__file__)), "--child", str(report)]
    begin = time.perf_counter()
    child = subprocess.run(
        command,
        env={**os.environ, "VISION_EXP_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        text=True,
    )
    seconds = time.perf_counter() - begin
    return seconds, int(report.read_text()), json.loads(child.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write-results", action="store_true")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        counted(arguments.child)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        cold_s, downloaded, result = measure(Path(folder))
        cached_s, again, _ = measure(Path(folder))
    unread = [entry["tree"] for entry in result["trees"] if entry["error"]]
    figures = {
        "cold_s": round(cold_s, 1),
        "cold_mb": round(downloaded / 1e6, 1),
        "cached_s": round(cached_s, 2),
        "cached_mb": round(again / 1e6, 2),
    }
    print(f"{machine()}: {len(result['trees'])} releases, {len(unread)} not read")
    for what, figure in figures.items():
        limit = LIMITS.get(what)
        late = "   MISSED" if limit and figure > limit else ""
        print(f"{what:10} {figure:8}" + (f"   at most {limit:g}{late}" if limit else ""))
    if arguments.write_results:
        date = datetime.date.today().isoformat()
        kept = {"date": date, "machine": machine(), "releases": len(result["trees"])}
        RESULTS.mkdir(exist_ok=True)
        file = RESULTS / f"drift-{date}.json"
        kept_all = {**kept, "figures": figures, "limits": LIMITS}
        file.write_text(json.dumps(kept_all, indent=2) + "\n")
    return int(bool(unread) or any(figures[what] > limit for what, limit in LIMITS.items()))


if __name__ == "__main__":
    raise SystemExit(main())
