"""Prints ours beside a native vLLM: each row's two values, their ratio with interval, the goal.

    python bench/beside.py FOUND.jsonl [--keep]

FOUND holds what `tests/gpu/run.sh beside` and `beside_start` measured. Runs alternated, so the
ratio is of pairs: the geometric mean of run i's two values, with a 95 % interval of Student's
t over the logarithms. Exit 1 where the ratio misses its goal; a row with fewer than five pairs
says so.
`--keep` writes bench/results/beside-DATE.json.
"""

from __future__ import annotations

import datetime
import json
import math
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
WANTED = 5
#: Two-sided 95 % of Student's t by degrees of freedom (any table, e.g. NIST/SEMATECH
#: e-Handbook, section 1.3.6.7.2).
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


@dataclass(frozen=True)
class Goal:
    """A row of the table. ``over`` and ``less``: a second value that it is divided by, or less."""

    what: str
    row: str
    unit: str
    limit: float | None = None
    at_least: bool = False
    over: str = ""
    less: str = ""


GOALS = (
    Goal("first token, one 1080p image, idle", "first_image", "ms", 0.90),
    Goal("first token, a text of that length, idle", "first_text", "ms"),
    Goal("first token, image less text", "first_image", "ms", less="first_text"),
    Goal("image requests a second, 8 clients", "images_8", "1/s", 1.05, True),
    Goal("image requests a second, 32 clients", "images_32", "1/s", 1.05, True),
    Goal("every second image the same, 8 clients", "repeated_8", "1/s", 1.00, True),
    Goal("every second image the same, 32 clients", "repeated_32", "1/s", 1.00, True),
    Goal("p99 between tokens of 16 streams, 4 images/s", "streams", "ms", 1.00),
    Goal("text requests a second, vision checkpoint", "text_vision", "1/s"),
    Goal("text, vision over text checkpoint", "text_vision", "", 1.00, True, over="text_text"),
    Goal("start, both at once", "start", "s", 1.10),
    Goal("GPU memory, vision less text checkpoint", "memory_vision", "B", 1.00, less="memory_text"),
    Goal("4K images prepared a second, 32/s offered", "streams_large_rate", "1/s", 1.00, True),
    Goal("p99 between tokens of 16 streams meanwhile", "streams_large", "ms", 1.00),
)


@dataclass(frozen=True)
class Line:
    """``ratio`` is ours over native, ``low`` and ``high`` its interval; none for one pair."""

    what: str
    unit: str
    ours: float
    native: float
    ratio: float
    low: float | None
    high: float | None
    pairs: int
    goal: float | None
    at_least: bool

    @property
    def reached(self) -> bool | None:
        if self.goal is None:
            return None
        return self.ratio >= self.goal if self.at_least else self.ratio <= self.goal

    @property
    def interval(self) -> str:
        if self.low is None or self.high is None:
            return "[one pair]"
        return f"[{self.low:.3f}, {self.high:.3f}]"

    @property
    def verdict(self) -> str:
        if self.reached is None:
            return "told"
        inside = (
            self.low is not None
            and self.high is not None
            and self.low < (self.goal or 0) < self.high
        )
        words = "reached" if self.reached else "MISSED"
        words += " (the interval holds the goal)" if inside else ""
        return words if self.pairs >= WANTED or self.unit == "B" else f"{words}, {self.pairs} runs"


def values(found: list[dict[str, Any]], goal: Goal, side: str) -> dict[int, float]:
    """By run; of the last entry where a run is there twice."""

    def of(row: str) -> dict[int, float]:
        return {e["run"]: float(e["value"]) for e in found if (e["row"], e["side"]) == (row, side)}

    first, second = of(goal.row), of(goal.over or goal.less)
    if goal.over:
        return {run: first[run] / second[run] for run in first.keys() & second.keys()}
    if goal.less:
        return {run: first[run] - second[run] for run in first.keys() & second.keys()}
    return first


def ratio(pairs: list[tuple[float, float]]) -> tuple[float, float | None, float | None]:
    """Geometric mean of first over second, and its 95 % interval. Values above 0."""
    logs = [math.log(first / second) for first, second in pairs]
    middle = statistics.fmean(logs)
    if len(logs) < 2:
        return math.exp(middle), None, None
    error = T95.get(len(logs) - 1, 2.262) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle), math.exp(middle - error), math.exp(middle + error)


def line(found: list[dict[str, Any]], goal: Goal) -> Line | None:
    """None where no run has both sides' values, or a difference of them is not above 0."""
    ours, native = (values(found, goal, side) for side in ("ours", "native"))
    pairs = [(ours[run], native[run]) for run in sorted(ours.keys() & native.keys())]
    pairs = [pair for pair in pairs if min(pair) > 0]
    if not pairs:
        return None
    middle = [statistics.median(side) for side in zip(*pairs, strict=True)]
    return Line(goal.what, goal.unit, *middle, *ratio(pairs), len(pairs), goal.limit, goal.at_least)


def main(path: str, *options: str) -> int:
    found = [json.loads(text) for text in Path(path).read_text().splitlines()]
    about = {e["side"]: e for e in found if e["row"] == "about"}
    words = "; ".join(
        f"{side} {e['value']} on {e['card']}, overlay {e['overlay']}" for side, e in about.items()
    )
    print(words or "what ran is not told")
    lines = [(goal, line(found, goal)) for goal in GOALS]
    for goal, each in lines:
        if each is None:
            print(f"{goal.what:46} not measured")
            continue
        sign = ">=" if each.at_least else "<="
        wanted = "" if each.goal is None else f"{sign} {each.goal:.2f}"
        print(
            f"{each.what:46} ours {each.ours:12.5g}  native {each.native:12.5g} {each.unit:4} "
            f"ratio {each.ratio:.3f} {each.interval}  {wanted:8} {each.verdict}"
        )
    if "--keep" in options:
        today = datetime.date.today().isoformat()
        kept = {"date": today, "about": about, "rows": [asdict(e) for _, e in lines if e]}
        out = RESULTS / f"beside-{today}.json"
        out.write_text(json.dumps(kept, indent=1) + "\n")
        print(f"kept in {out}")
    return int(any(each is not None and each.reached is False for _, each in lines))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
