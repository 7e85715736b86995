"""How quick and how small the patcher is, as ratios measured in one run.

    python bench/patcher.py [--rounds N] [--write-results]

Two figures, each against a peer timed in the same rounds:
  again   a second `apply`, and `status`, on an applied release, over a bare Python that imports
          hashlib, json and argparse. Wanted: at most 2.5, without importing LibCST
  first   the first `apply` on the newest, over a process that parses the same files once: targets
          with LibCST, all that is judged with ast. Wanted: at most 3, with at most 150 MB of memory
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "tests"), str(REPO / "tests" / "support")]

import hotfix_rig  # noqa: E402 (the path is set above)

from anchors.releases import known  # noqa: E402

RELEASE = known.newest()
BARE = "import hashlib, json, argparse"
PARSE = """
import ast, sys, pathlib, libcst
with_libcst, _, with_ast = " ".join(sys.argv[1:]).partition(" -- ")
for path in with_libcst.split():
    libcst.parse_module(pathlib.Path(path).read_bytes())
for path in with_ast.split():
    ast.parse(pathlib.Path(path).read_bytes())
"""


# A child starts with its parent's peak on its account, so a parent that is small asks for it.
PEAK = """
import os, subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
print(os.wait4(child.pid, 0)[2].ru_maxrss)
"""


def peak_mb(command: list[str], environment: dict[str, str]) -> float:
    """Peak resident memory of one process in MB."""
    asking = [sys.executable, "-S", "-E", "-c", PEAK, *command]
    return int(subprocess.check_output(asking, env=environment)) / 1024


def timed(command: list[str], environment: dict[str, str]) -> float:
    """Wall-clock seconds of one process."""
    start = time.perf_counter()
    child = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    code = child.wait()
    seconds = time.perf_counter() - start
    if code:
        raise SystemExit(f"exit {code}: {' '.join(command)}")
    return seconds


def measure(folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds over rounds that run every contender once; peak memory of one run each."""
    rig = hotfix_rig.make(folder, RELEASE)
    interpreter = [sys.executable, "-B"]

    def hotfix(*words: str) -> list[str]:
        return [*interpreter, str(hotfix_rig.HOTFIX), *rig.arguments(*words)]

    rig.run("apply")
    targets = [str(rig.root / file["path"]) for file in rig.run("--json", "status").json["files"]]
    targets = [path for path in targets if Path(path).exists()]
    receipt = json.loads((rig.root / ".vision-exp" / "receipt.json").read_text())
    judged = [str(rig.root / path) for path, digest in receipt["judged"].items() if digest]
    rig.run("revert")

    contenders: dict[str, tuple[list[str], Callable[[], object]]] = {
        "parse": ([*interpreter, "-c", PARSE, *targets, "--", *targets, *judged], lambda: None),
        "first apply": (hotfix("apply"), lambda: rig.run("revert")),
        "bare": ([*interpreter, "-c", BARE], lambda: rig.run("apply")),
        "second apply": (hotfix("apply"), lambda: None),
        "status": (hotfix("status"), lambda: None),
    }
    runs: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, (command, prepare) in contenders.items():
            prepare()
            runs[name].append(timed(command, rig.environment))
    found = {name: {"seconds": statistics.median(many)} for name, many in runs.items()}
    for name, (command, prepare) in contenders.items():
        prepare()
        found[name]["peak_mb"] = peak_mb(command, rig.environment)
    return found


def figures(medians: dict[str, dict[str, float]]) -> list[tuple[str, float, float]]:
    """(what, measured, most that is wanted)."""

    def ratio(name: str, peer: str) -> float:
        return medians[name]["seconds"] / medians[peer]["seconds"]

    return [
        ("second apply / bare Python", ratio("second apply", "bare"), 2.5),
        ("status / bare Python", ratio("status", "bare"), 2.5),
        ("first apply / import LibCST and parse", ratio("first apply", "parse"), 3.0),
        ("first apply, peak memory in MB", medians["first apply"]["peak_mb"], 150.0),
    ]


def machine() -> dict[str, str]:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":")[1] for line in info.read_text().splitlines() if "model name" in line
        ]
        model = names[0].strip() if names else model
    return {
        "cpu": f"{os.cpu_count()} x {model}",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument(
        "--write-results", action="store_true", help="keep the figures in bench/results/"
    )
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        medians = measure(Path(folder) / "rig", options.rounds)
    found = figures(medians)
    report = {
        "date": datetime.date.today().isoformat(),
        "vllm": RELEASE,
        "rounds": options.rounds,
        "machine": machine(),
        "medians": medians,
        "figures": {what: round(value, 2) for what, value, _ in found},
    }
    print(", ".join(report["machine"].values()), f"{options.rounds} rounds", sep=", ")  # type: ignore[attr-defined]
    for what, value, limit in found:
        verdict = "" if value <= limit else "   MISSED"
        print(f"{what:40} {value:7.2f}   wanted: at most {limit:g}{verdict}")
    if options.write_results:
        target = REPO / "bench" / "results" / f"patcher-{report['date']}.json"
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(report, indent=2) + "\n")
    return int(any(value > limit for _, value, limit in found))


if __name__ == "__main__":
    raise SystemExit(main())
