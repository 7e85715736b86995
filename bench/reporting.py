"""What the benchmarks of images and tower share: interleaved runs, the machine, reporting."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"


Clock = Callable[[], float]


def milliseconds(work: Callable[[], object], clock: Clock) -> float:
    start = clock()
    work()
    return (clock() - start) * 1e3


def compare(
    native: Callable[[], object],
    mine: Callable[[], object],
    rounds: int,
    clock: Clock = time.perf_counter,
) -> dict[str, float]:
    """Medians of interleaved runs, native and ours in turn, after one unmeasured run each.

    The ratio is the median of the pairs' ratios: both runs of a pair see the same machine. For
    work of one thread, `time.thread_time` leaves out what other processes take away.
    """
    pairs = [(milliseconds(native, clock), milliseconds(mine, clock)) for _ in range(rounds + 1)][
        1:
    ]
    return {
        "native_ms": round(statistics.median(first for first, _ in pairs), 2),
        "ours_ms": round(statistics.median(second for _, second in pairs), 2),
        "ratio": round(statistics.median(first / second for first, second in pairs), 2),
    }


def machine() -> str:
    names = [platform.processor() or platform.machine()]
    info = Path("/proc/cpuinfo")
    if info.exists():
        names += [n.split(":")[1].strip() for n in info.read_text().splitlines() if "model n" in n]
    return f"{os.cpu_count()} x {names[-1]}"


def report(
    name: str,
    versions: dict[str, str],
    figures: dict[str, dict[str, float]],
    wanted: dict[str, float],
    *,
    keep: bool,
) -> int:
    """Print the figures, keep them in bench/results/ if asked; 1 if one is below what is wanted."""
    print(", ".join([machine(), *(f"{what} {version}" for what, version in versions.items())]))
    missed = False
    for what, figure in figures.items():
        late = figure["ratio"] < wanted[what]
        missed |= late
        print(
            f"{what:22} native {figure['native_ms']:9.2f} ms  ours {figure['ours_ms']:9.2f} ms  "
            f"{figure['ratio']:5.2f} times  wanted: at least {wanted[what]:g}"
            + ("   MISSED" if late else "")
        )
    if keep:
        rows = {what: {**one, "wanted": wanted[what]} for what, one in figures.items()}
        save(name, {**versions, "figures": rows})
    return int(missed)


def save(name: str, found: Mapping[str, object]) -> None:
    """Keep what was found in bench/results/, with the day and the machine."""
    date = datetime.date.today().isoformat()
    kept = {"date": date, "machine": machine(), **found}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}-{date}.json").write_text(json.dumps(kept, indent=2) + "\n")
