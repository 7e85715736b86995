"""A launch is repeated from memory only where nothing of it differs."""

from __future__ import annotations

from pathlib import Path
from types import FunctionType
from typing import Any

import known_launches
import pytest
import torch
import triton
from known_launches import Launches

FACTOR = 3


@triton.jit
def _scale(x, count):
    return x * count * FACTOR


@triton.jit
def _kernel(data, out, count):
    return _scale(data, count)


@triton.jit
def _other(data, out, count):
    return _scale(data, count) + 1


class Runs:
    """Launches on real tensors; counts those that were run."""

    def __init__(self, folder: Path) -> None:
        self.launches, self.run = Launches(folder), 0

    def __call__(self, kernel: Any = _kernel, grid: Any = (2,), **changed: Any) -> torch.Tensor:
        tensors = {"data": torch.arange(6.0), "out": torch.full((6,), -1.0)}
        arguments: dict[str, Any] = {**tensors, "count": 2, **changed}

        def run() -> None:
            self.run += 1
            arguments["out"].copy_(arguments["data"] * self.run)

        self.launches.launch(kernel.fn, grid, arguments, run)
        return arguments["out"]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def test_an_equal_launch_is_not_run_again(runs: Runs, tmp_path: Path) -> None:
    first = runs()
    assert torch.equal(runs(), first)
    assert torch.equal(first, torch.arange(6.0))
    another = Runs(tmp_path)  # of another process
    assert torch.equal(another(), first)
    assert (runs.run, runs.launches.repeated, another.run) == (1, 1, 0)


@pytest.mark.parametrize(
    "changed",
    [
        {"data": torch.tensor([0.0, 1, 2, 3, 4, 6])},
        {"data": torch.arange(6.0, dtype=torch.float64)},
        {"data": torch.arange(7.0)[:6]},
        {"data": torch.arange(-1.0, 6.0)[1:]},
        {"out": torch.full((6,), -2.0)},
        {"count": 3},
        {"count": 2.0},
        {"grid": (3,)},
        {"kernel": _other},
    ],
    ids=str,
)
def test_one_that_differs_is_run(runs: Runs, changed: dict[str, Any]) -> None:
    runs()
    runs(**changed)
    assert (runs.run, runs.launches.repeated) == (2, 0)


def test_a_changed_callee_or_constant_is_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel: FunctionType = _kernel.fn
    before = known_launches.source(kernel)
    assert "x * count * FACTOR" in before
    monkeypatch.setitem(kernel.__globals__, "FACTOR", 4)
    changed = known_launches.source(kernel)
    assert changed != before
    monkeypatch.setitem(kernel.__globals__, "_scale", _other)
    assert known_launches.source(kernel) not in (before, changed)


def test_tensors_of_one_storage_are_told_from_those_of_two(runs: Runs) -> None:
    both = torch.arange(6.0)
    runs(data=torch.arange(6.0), out=torch.arange(6.0))
    runs(data=both, out=both)
    assert runs.run == 2


def test_what_is_not_understood_is_run_each_time(runs: Runs) -> None:
    for _ in range(2):
        runs(grid=lambda meta: (1,))
        runs(count=object())
    assert (runs.run, runs.launches.repeated) == (4, 0)
