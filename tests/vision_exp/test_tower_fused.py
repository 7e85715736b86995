"""The fused blocks compute what tower.py computes, run in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vision_exp import tower_graphs

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
        graphs = tower_graphs.Graphs(None, torch.zeros(1, 1), by_nobody, by_nobody)
    assert made == sorted(made, reverse=True)
    for rows in (1, 640, 784, 3108, 3312):
        bucket = graphs.bucket([rows])
        assert rows <= bucket.rows <= max(640, rows + 127)
    assert graphs.bucket([3329]) is None
    assert graphs.bucket([784, 784]) is None


def by_nobody(*_: object) -> None:
    raise AssertionError("nothing is captured here")
