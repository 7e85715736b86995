"""What gpu_serving.py concludes from the times that it kept."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import interleaved
from gpu.lib.rig import Report
from visibility import IMAGE_LIMIT

OVER_STOCK_LIMIT = 1.01
#: Beyond the tower itself, as a share of its time.
FIRST_TOKEN_LIMIT = 1.10

Found = dict[str, Any]


def assess(out: str, report_path: str) -> int:
    report = Report(Path(report_path))
    found = json.loads(Path(out).read_text()) if Path(out).exists() else {}
    for kind, name in (("prefill", "text prefill"), ("decode", "decode step")):
        report.run(f"{name}, patched over stock", lambda k=kind: over_stock(found, k))
    report.run("decode step, functions called", lambda: functions(found))
    return assess_images(report, found)


def assess_images(report: Report, found: Found) -> int:
    report.run("image prefill, visible over causal", lambda: over_causal(found))
    report.run("first token, in the engine", lambda: over_text(found, whole=False))
    report.run("first token, with the preparation", lambda: over_text(found, whole=True))
    return 0 if all(row.ok is not False for row in report.rows) else 1


def over_stock(found: Found, kind: str) -> tuple[bool | None, str]:
    if not found.get("text"):
        return False, "nothing was measured"
    series = {label: together(rows, kind) for label, rows in found["text"].items()}
    stock = {label: times for label, times in series.items() if label.startswith("stock")}
    patched = {label: times for label, times in series.items() if label not in stock}
    result = interleaved.compare(stock, patched)
    medians = ", ".join(f"{label} {statistics.median(t):.3f}" for label, t in series.items())
    words = f"{result.words()}; medians, ms: {medians}; {min(map(len, series.values()))} times each"
    if found["vision"]:
        fast = interleaved.fastest_tenth(together(found["vision"], kind))
        words += f"; vision checkpoint, fastest tenth {fast:.3f}"
    good = result.within(OVER_STOCK_LIMIT)
    if good is None:
        words += "; not decided, processes of one tree differ by more than the limit allows to see"
    return good, words


def together(rows: list[dict[str, list[float]]], kind: str) -> list[float]:
    return [time for run in rows for time in run[kind]]


def functions(found: Found) -> tuple[bool, str]:
    """A text checkpoint's decode step calls what stock's does, and nothing of vision_exp."""
    own = found.get("own")
    if not own:
        return False, "nothing was measured"
    stock, patched, vision = (own[label] for label in ("stock 1", "patched 1", "vision"))
    words = (
        f"text checkpoint {patched['all']:.1f} calls where stock has {stock['all']:.1f}, "
        f"{patched['calls']:.1f} of them into vision_exp; of text on the vision checkpoint "
        f"{vision['calls']:.1f}, {vision['microseconds']:.0f} us in them under the profiler"
    )
    good = patched["calls"] == 0 and patched["all"] <= OVER_STOCK_LIMIT * stock["all"]
    return good, words


def over_causal(found: Found) -> tuple[bool, str]:
    if not found.get("visible"):
        return False, "nothing was measured"
    ratios = [visible / causal for visible, causal in found["visible"]]
    low, median, high = statistics.quantiles(ratios, n=4)
    words = f"ratio {median:.4f} (half of the pairs within {low:.4f} to {high:.4f})"
    return median <= IMAGE_LIMIT, f"{words}, {len(ratios)} pairs"


def over_text(found: Found, *, whole: bool) -> tuple[bool, str]:
    """``whole``: with the preparation in the front end, as one waits for it when nothing else runs;
    else in the engine alone."""
    rows = found.get("first")
    if not rows:
        return False, "nothing was measured"
    tower = statistics.median(time for row in rows for time in row["tower"])
    extras = [
        (sum(row["image"]) - sum(row["text"])) if whole else row["image"][1] - row["text"][1]
        for row in rows
    ]
    extra = statistics.median(extras)
    parts = {
        name: " + ".join(f"{statistics.median(row[name][i] for row in rows):.1f}" for i in (0, 1))
        for name in ("image", "again", "text")
    }
    pixels, naming = (statistics.median(row[name] for row in rows) for name in ("pixels", "naming"))
    words = (
        f"image less text {extra:.1f} ms = {extra / tower:.2f} of the tower's {tower:.1f} ms, nine "
        f"rounds of ten within {statistics.quantiles(extras, n=10)[-1]:.1f}; "
        f"front end + engine: image {parts['image']} ms, prepared before {parts['again']} ms, "
        f"text {parts['text']} ms; of an image's preparation, parsing and hash "
        f"{naming:.1f} ms, pixels to patches {pixels:.1f} ms; {len(rows)} rounds"
    )
    return extra <= FIRST_TOKEN_LIMIT * tower, words
