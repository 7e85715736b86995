"""What bench/beside.py concludes from values measured in turn."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import beside


def found(row: str, ours: list[float], native: list[float]) -> list[dict]:
    return [
        {"row": row, "side": side, "run": run, "value": value}
        for side, series in (("ours", ours), ("native", native))
        for run, value in enumerate(series, 1)
    ]


def goal(what: str) -> beside.Goal:
    (one,) = (each for each in beside.GOALS if each.what == what)
    return one


def test_the_ratio_is_of_pairs_with_students_interval() -> None:
    # Logarithms 0 and 0.2: mean 0.1, half width 12.706 * 0.1414 / sqrt(2) = 1.2706.
    middle, low, high = beside.ratio([(1.0, 1.0), (1.2214027581601699, 1.0)])
    assert middle == pytest.approx(1.1051709)
    assert (low, high) == pytest.approx((0.3101808, 3.9376945), rel=1e-4)


def test_a_machine_that_slows_both_widens_nothing() -> None:
    each = beside.line(
        found("first_image", [8, 16, 24, 32, 40], [10, 20, 30, 40, 50]), beside.GOALS[0]
    )
    assert each is not None
    assert (each.ratio, each.low, each.high) == pytest.approx((0.8, 0.8, 0.8))
    assert each.verdict == "reached"


@pytest.mark.parametrize(
    ("ours", "native", "verdict"),
    [
        ([10.4] * 5, [10] * 5, "MISSED"),
        ([10.6] * 5, [10] * 5, "reached"),
        ([10.0, 11.0, 10.0, 11.0, 11.0], [10] * 5, "reached (the interval holds the goal)"),
        ([10.6] * 3, [10] * 3, "reached, 3 runs"),
    ],
)
def test_more_requests_a_second_are_wanted(
    ours: list[float], native: list[float], verdict: str
) -> None:
    each = beside.line(found("images_8", ours, native), goal("image requests a second, 8 clients"))
    assert each is not None
    assert each.verdict == verdict


def test_text_is_each_releases_vision_checkpoint_over_its_own_text_checkpoint() -> None:
    rows = found("text_vision", [9, 9], [18, 18]) + found("text_text", [10, 10], [18, 18])
    each = beside.line(rows, goal("text, vision over text checkpoint"))
    assert each is not None
    assert (each.ours, each.native, each.ratio) == pytest.approx((0.9, 1.0, 0.9))
    assert each.verdict == "MISSED, 2 runs"


def test_memory_is_the_vision_checkpoints_less_the_texts() -> None:
    rows = found("memory_vision", [9e9], [12e9]) + found("memory_text", [8e9], [10e9])
    each = beside.line(rows, goal("GPU memory, vision less text checkpoint"))
    assert each is not None
    assert each.ratio == pytest.approx(0.5)


def test_a_run_that_only_one_side_has_counts_for_nothing() -> None:
    assert beside.line(found("start", [50.0], []), goal("start, both at once")) is None


def test_the_table_tells_what_was_not_measured_and_fails_for_a_missed_goal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.jsonl"
    rows = found("images_8", [11.0] * 5, [10.0] * 5)
    path.write_text("\n".join(map(json.dumps, rows)))
    assert beside.main(str(path)) == 0
    said = capsys.readouterr().out
    assert "start, both at once" in said
    assert "not measured" in said
    path.write_text("\n".join(map(json.dumps, rows + found("start", [12.0], [10.0]))))
    assert beside.main(str(path)) == 1
    assert "MISSED, 1 runs" in capsys.readouterr().out
