"""The fused blocks compute what tower.py computes, run in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vision_exp.tower import graphs
from vision_exp.tower.hopper import waves

ROOT = Path(__file__).resolve().parents[3]
CHILD = Path(__file__).with_name("in_vllm") / "child_fused.py"


@pytest.fixture(scope="module")
def found() -> Any:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(CHILD)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.xdist_group("fused")
def test_fused_blocks_equal_the_tower(found: Any) -> None:
    assert found["error"] < 1e-5
    assert found["shared"] < 1e-5
    assert found["swiglu"] < 1e-6
    assert found["tail"] < 1e-5


@pytest.mark.xdist_group("fused")
def test_rocm_tries_the_fused_blocks_and_says_where_it_does_without(found: Any) -> None:
    tried = found["rocm"]
    assert tried["elsewhere"] == [[True], []]
    assert tried["works"] == [[True, True], []]
    for name, why in (("raises", "RuntimeError: PassManager::run failed)"), ("wrong", "off by ")):
        answers, (line,) = tried[name]  # said once
        assert answers == [False, False]
        assert line.startswith("[vision-exp] the tower runs module by module")
        assert why in line


@pytest.mark.xdist_group("fused")
@pytest.mark.parametrize("kind", ["torch", "triton", "trusting"])
def test_what_lies_behind_an_image_in_its_graph_changes_nothing(found: Any, kind: str) -> None:
    assert found["buckets"][kind] < 1e-5


@pytest.mark.xdist_group("fused")
@pytest.mark.parametrize(
    ("capture", "rows", "line"),
    [
        ("works", [11, 20], "[vision-exp] tower graphs for 2 row counts"),
        ("forgets", None, "ReplayError: rows of replays differ from launched ones (11: "),
        ("fails", None, "RuntimeError: operation not permitted when stream is capturing"),
        ("raises", None, "TypeError: no such keyword"),
    ],
)
def test_a_tower_without_graphs_says_why_and_goes_on(
    found: Any, capture: str, rows: list[int] | None, line: str
) -> None:
    assert found["captures"][capture]["rows"] == rows
    (said,) = found["captures"][capture]["log"]
    assert line in said
    assert rows or said.startswith("[vision-exp] no CUDA graphs for the tower: ")


def test_buckets_hold_every_image_with_little_to_spare() -> None:
    made: list[int] = []

    def make(rows: int) -> SimpleNamespace:
        made.append(rows)
        return SimpleNamespace(rows=rows)

    buckets = graphs.make_buckets(make)
    assert made == sorted(made, reverse=True)
    for rows, spare in ((1, 639), (640, 127), (784, 127), (2100, 63), (3108, 63), (3312, 63)):
        bucket = graphs.find_bucket(buckets, [rows])
        assert rows <= bucket.rows <= rows + spare
    for rows in graphs.SIZES:
        assert graphs.find_bucket(buckets, [rows]).rows == rows
    assert graphs.find_bucket(buckets, [3328]) is None
    assert graphs.find_bucket(buckets, [784, 784]) is None


def test_a_replay_that_is_no_number_is_not_near() -> None:
    assert [graphs._near(error) for error in (0.0, 0.1, 0.11, float("nan"))] == [1, 1, 0, 0]


def test_rows_of_one_image_outlive_the_next_replay() -> None:
    bucket = object.__new__(graphs.Bucket)
    out, put = torch.zeros(4, 2), []
    bucket.static = SimpleNamespace(out=out, copy_inputs=lambda *given: put.append(given))
    bucket.replay = lambda: out.add_(1)
    patches = torch.zeros(3, 3, 2, 2)
    first, second = bucket.run(patches, 5), bucket.run(patches, 7)
    assert (first.tolist(), second.tolist()) == ([[1, 1]] * 3, [[2, 2]] * 3)
    assert [width for _, width in put] == [5, 7]


@pytest.mark.parametrize(
    ("rows", "heads", "expected"),
    [
        (3108, 16, (3072, 8)),
        (3312, 16, (3072, 8)),
        (3072, 16, (3072, 0)),
        (2047, 16, (1536, 4)),
        (2111, 16, (2111, 0)),  # too much would be left
        (2560, 16, (2560, 0)),  # a second wave, nearly full
        (784, 16, (784, 0)),  # not even one
        (3108, 8, (3072, 4)),
    ],
)
def test_flash_attention_gets_full_waves(rows: int, heads: int, expected: tuple[int, int]) -> None:
    found = waves.full_waves(rows, heads, num_sms=132)
    assert (found.rows, found.idle) == expected


@pytest.mark.parametrize("num_sms", [48, 108, 132, 148, 160])
@pytest.mark.parametrize("heads", [4, 8, 16])
def test_no_wave_is_left_half_empty(heads: int, num_sms: int) -> None:
    for rows in range(1, 3400):
        found = waves.full_waves(rows, heads, num_sms)
        if found.rows == rows:
            assert not found.idle
            continue
        assert found.rows % waves.TILE == 0
        assert 0 < rows - found.rows <= waves.MAX_TAIL
        tiles = found.rows // waves.TILE * heads
        assert (tiles + found.idle) % num_sms == 0
        assert found.idle < heads
