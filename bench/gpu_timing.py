"""Times on a GPU's own clock, and the rate that a floor is computed from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def milliseconds(run: Callable[[], Any], repeat: int = 20) -> float:
    """Median over ``repeat`` runs, timed on the device, after three for warming up."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeat // 2]


def matrix_rate(size: int = 8192) -> float:
    """Operations a second of a large BF16 product of random matrices."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / (milliseconds(lambda: a @ b, repeat=10) / 1e3)


def graphed(run: Callable[[], Any]) -> float:
    """Milliseconds without launch costs: replays of a captured graph. Not what requests get."""
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    return milliseconds(graph.replay)
