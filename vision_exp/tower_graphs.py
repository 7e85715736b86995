"""CUDA graphs of the tower's blocks for single pictures, captured once at start-up.

A picture of 28x28 patches is a millisecond of arithmetic in nine launches per block, and launching
them takes several. So the blocks are captured for a fixed set of row counts, when the tower first
runs: in vLLM's profile run, where their memory is counted. A picture runs in the next larger one:
its rows first, then rows of zeros that form a picture of their own, seen by nobody. Several
pictures packed into one call keep the device busy by themselves and run without.

Left out, so that the blocks run as they are: sharded towers (their all-reduce belongs into vLLM's
own capture), attention that cannot take lengths from the device, VISION_EXP_TOWER_GRAPHS=0.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vision_exp import tower_fused

SWITCH = "VISION_EXP_TOWER_GRAPHS"
#: Rows from the smallest picture that the transform makes to the largest.
STEP, FEWEST, MOST = 128, 640, 3328

logger = logging.getLogger("vllm.vision_exp")

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]


class Bucket:
    """Static buffers for pictures of at most ``rows`` rows, and the captured work on them."""

    def __init__(
        self,
        tower: Any,
        rows: int,
        like: torch.Tensor,
        attend: tower_fused.AttendEdges,
        capture: Capture,
    ) -> None:
        self.rows = rows
        wide = (rows, tower.config.head_dim // 2)
        with torch.inference_mode(False), torch.device(like.device):
            self.x = torch.zeros((rows, like.shape[1]), dtype=like.dtype)
            self.out = torch.empty_like(self.x)
            self.cos = torch.ones(wide, dtype=torch.float32)
            self.sin = torch.zeros_like(self.cos)
            self.edges = torch.tensor([0, rows // 2, rows], dtype=torch.int32)

        def work() -> None:
            normed = tower_fused.run_blocks(
                list(tower.blocks),
                tower.norm,
                self.x,
                self.cos,
                self.sin,
                [rows],
                lambda qkv, _lengths: attend(qkv, self.edges, rows),
            )
            self.out.copy_(normed)

        self.replay = capture(work)

    def run(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Final rows of one picture ``x`` (n, dim). No synchronisation."""
        count = len(x)
        self.x[:count].copy_(x)
        self.x[count:].zero_()  # the blocks write into x: old rows would grow with every replay
        self.cos[:count].copy_(cos.view(count, -1))
        self.sin[:count].copy_(sin.view(count, -1))
        self.edges[1].fill_(count)
        self.replay()
        return self.out[:count].clone()


class Graphs:
    """All buckets of one tower; largest first, so that the smaller ones reuse its memory."""

    def __init__(
        self, tower: Any, like: torch.Tensor, attend: tower_fused.AttendEdges, capture: Capture
    ) -> None:
        sizes = range(MOST, FEWEST - 1, -STEP)
        made = [Bucket(tower, rows, like, attend, capture) for rows in sizes]
        self.buckets = {bucket.rows: bucket for bucket in made}

    def bucket(self, lengths: Sequence[int]) -> Bucket | None:
        """The bucket for a call with pictures of these lengths, if it is one for a graph."""
        if len(lengths) != 1:
            return None
        return self.buckets.get(max(FEWEST, -(-lengths[0] // STEP) * STEP))


def run(
    tower: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, lengths: Sequence[int]
) -> torch.Tensor:
    """All blocks and the final norm over ``x`` (n, dim), by a graph where there is one."""
    if not torch.cuda.is_current_stream_capturing():
        graphs = of(tower, x)
        bucket = graphs.bucket(lengths) if graphs else None
        if bucket:
            return bucket.run(x, cos, sin)
    return tower_fused.run_blocks(list(tower.blocks), tower.norm, x, cos, sin, lengths)


def of(tower: Any, like: torch.Tensor) -> Graphs | None:
    """The tower's graphs, captured now if this is the first call; None where there are none."""
    if not hasattr(tower, "_graphs"):
        tower._graphs = _make(tower, like)
    found: Graphs | None = tower._graphs
    return found


def _make(tower: Any, like: torch.Tensor) -> Graphs | None:
    sharded = tower.blocks[0].attn.n_heads != tower.config.n_heads
    attend = tower_fused.attention_by_edges()
    if os.environ.get(SWITCH) == "0" or sharded or attend is None:
        return None
    pool, side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def capture(work: Callable[[], None]) -> Replay:
        # Not torch.cuda.graph: that collects garbage each time, seconds in a large process.
        graph = torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()  # compiles kernels and makes handles, which a capture must not
            torch.cuda.synchronize()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(side)
        return graph.replay

    try:
        graphs = Graphs(tower, like, attend, capture)
    except RuntimeError as error:
        # Slower, not wrong: the same kernels run one by one.
        logger.warning("[vision-exp] no CUDA graphs for the tower: %s", error)
        return None
    logger.info("[vision-exp] tower graphs for %d row counts", len(graphs.buckets))
    return graphs
