"""The fused blocks compute what tower.py computes, run in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vision_exp.tower import flash
from vision_exp.tower import graphs as tower_graphs

ROOT = Path(__file__).resolve().parents[3]
CHILD = Path(__file__).with_name("in_vllm") / "child_fused.py"


def test_fused_blocks_equal_the_tower() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(CHILD)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["error"] < 1e-5
    assert found["shared"] < 1e-5
    assert found["swiglu"] < 1e-6
    assert found["buckets"] < 1e-5
    assert found["rest"] < 1e-5


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
        (3108, 16, (3072, 8)),
        (3312, 16, (3072, 8)),
        (3072, 16, (3072, 0)),
        (2047, 16, (1536, 4)),
        (2111, 16, (2111, 0)),  # too much would be left
        (2560, 16, (2560, 0)),  # a second round, nearly full
        (784, 16, (784, 0)),  # not even one
        (3108, 8, (3072, 4)),
    ],
)
def test_flash_attention_gets_whole_rounds(
    rows: int, heads: int, expected: tuple[int, int]
) -> None:
    found = flash.whole_rounds(rows, heads, processors=132)
    assert (found.rows, found.idle) == expected


@pytest.mark.parametrize("processors", [48, 108, 132, 148, 160])
@pytest.mark.parametrize("heads", [4, 8, 16])
def test_no_round_is_left_half_empty(heads: int, processors: int) -> None:
    for rows in range(1, 3400):
        found = flash.whole_rounds(rows, heads, processors)
        if found.rows == rows:
            assert not found.idle
            continue
        assert found.rows % flash.TILE == 0
        assert 0 < rows - found.rows <= flash.MOST_LEFT
        tiles = found.rows // flash.TILE * heads
        assert (tiles + found.idle) % processors == 0
        assert found.idle < heads
