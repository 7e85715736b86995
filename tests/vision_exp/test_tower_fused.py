"""The fused blocks compute what tower.py computes, run in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vision_exp import tower_attention, tower_graphs

ROOT = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("children") / "fused_tower.py"


def test_fused_blocks_equal_the_tower() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(CHILD)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["error"] < 1e-5
    assert found["swiglu"] < 1e-6
    assert found["buckets"] < 1e-5


def test_buckets_hold_every_picture_with_little_to_spare() -> None:
    made: list[int] = []

    class Size:
        def __init__(self, _tower: object, rows: int, *_: object) -> None:
            self.rows = rows
            made.append(rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tower_graphs, "Bucket", Size)
        graphs = tower_graphs.Graphs(None, by_nobody, lambda rows: by_nobody, by_nobody)
    assert made == sorted(made, reverse=True)
    for rows, spare in ((1, 639), (640, 127), (784, 127), (2100, 63), (3108, 63), (3312, 63)):
        bucket = graphs.bucket([rows])
        assert rows <= bucket.rows <= rows + spare
    assert graphs.bucket([3328]) is None
    assert graphs.bucket([784, 784]) is None


def by_nobody(*_: object) -> None:
    raise AssertionError("nothing is captured here")


@pytest.mark.parametrize(
    ("rows", "heads", "expected"),
    [
        (3108, 16, [(0, 3072, 1), (3072, 3108, 8)]),
        (3312, 16, [(0, 3072, 1), (3072, 3312, 4)]),
        (3072, 16, [(0, 3072, 1)]),
        (2560, 16, [(0, 2560, 1)]),  # a second round, nearly full
        (784, 16, [(0, 784, 1)]),  # not even one
        (3108, 8, [(0, 3072, 1), (3072, 3108, 16)]),
    ],
)
def test_rows_behind_the_last_full_round_get_their_own_call(
    rows: int, heads: int, expected: list[tuple[int, int, int]]
) -> None:
    found = tower_attention.shares(rows, heads, processors=132)
    assert [(share.start, share.stop, share.splits) for share in found] == expected


@pytest.mark.parametrize("processors", [48, 108, 132, 148, 160])
@pytest.mark.parametrize("heads", [4, 8, 16])
def test_shares_cover_every_row_once(heads: int, processors: int) -> None:
    for rows in range(1, 3400):
        found = tower_attention.shares(rows, heads, processors)
        assert found[0].start == 0
        assert found[-1].stop == rows
        assert all(a.stop == b.start for a, b in zip(found, found[1:], strict=False))
        assert all(share.start < share.stop and share.splits >= 1 for share in found)
