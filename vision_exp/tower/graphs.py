"""CUDA graphs of the tower for single pictures, captured once at start-up.

A picture of 28x28 patches is a millisecond of arithmetic in nine launches per block, and launching
them takes several. So the whole tower, from patches to final rows, is captured for a fixed set of
row counts when it first runs: in vLLM's profile run, where its memory is counted. A picture runs
in the next larger one: its patches first, then whatever lies there, which takes part in no
picture row's attention. Several pictures packed into one call keep the device busy by themselves
and run without.

Left out, so that the blocks run as they are: sharded towers (their all-reduce belongs into vLLM's
own capture), cards for which vLLM has no FlashAttention, VISION_EXP_TOWER_GRAPHS=0.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vision_exp.tower import flash, fused
from vision_exp.tower.device import flash_version, on_device

SWITCH = "VISION_EXP_TOWER_GRAPHS"
#: Row counts to capture, for the smallest picture that the transform makes to the largest. One less
#: than a multiple of 64, for which cuBLAS takes slower kernels (linear layers of a block at 3,200
#: rows: 135 microseconds, at 3,199: 123, on an H200).
SIZES = tuple(rows - 1 for rows in (*range(640, 2048, 128), *range(2048, 3329, 64)))

logger = logging.getLogger("vllm.vision_exp")

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]


class Places:
    """Where replays read and write, on the device; all graphs use the same, one after the other."""

    def __init__(self, rows: int, patches: torch.Tensor, out: torch.Tensor) -> None:
        with torch.inference_mode(False):
            values = fused.aligned(patches.shape[1:].numel())
            self.patches = patches.new_zeros((rows, values))
            self.shape = torch.tensor([0, rows, 1], dtype=torch.int32, device=patches.device)
            self.out = out.new_empty((rows, *out.shape[1:]))

    @property
    def keys(self) -> torch.Tensor:
        """[0, rows of the picture]."""
        return self.shape[:2]

    @property
    def width(self) -> torch.Tensor:
        """[columns of the picture's grid]."""
        return self.shape[2:]

    def fill(self, patches: torch.Tensor, width: int) -> None:
        """Puts one picture in place. No synchronisation."""
        flat = patches.flatten(1)
        self.patches[: len(flat), : flat.shape[1]].copy_(flat)
        self.shape.copy_(on_device((0, len(patches), width), patches.device))


class Bucket:
    """The captured tower for a picture of at most ``rows`` patches."""

    def __init__(
        self,
        tower: Any,
        rows: int,
        places: Places,
        attention: flash.ForKeys,
        capture: Capture,
    ) -> None:
        self.rows, self.places = rows, places
        self.attention = attention  # the graph goes on using what it holds

        def work() -> None:
            x = fused.embed(places.patches[:rows], tower.patch_embed.proj)
            axes = tower.axis_tables(x.device)
            cos, sin = (fused.spread(axis, places.width, rows) for axis in axes)
            attend = attention(places.keys)
            normed = fused.run_blocks(
                list(tower.blocks),
                tower.norm,
                x,
                cos,
                sin,
                [rows],
                lambda qkv, _lengths: attend(qkv),
            )
            places.out[:rows].copy_(normed)

        self.replay = capture(work)

    def run(self, patches: torch.Tensor, width: int) -> torch.Tensor:
        """Final rows (n, dim) of one picture's patches (n, 3, p, p). No synchronisation."""
        self.places.fill(patches, width)
        self.replay()
        return self.places.out[: len(patches)].clone()


class Graphs:
    """All buckets of one tower; largest first, so that the smaller ones reuse its memory."""

    def __init__(
        self,
        tower: Any,
        places: Places,
        attention: Callable[[int], flash.ForKeys],
        capture: Capture,
    ) -> None:
        made = [Bucket(tower, rows, places, attention(rows), capture) for rows in reversed(SIZES)]
        self.buckets = made[::-1]

    def bucket(self, lengths: Sequence[int]) -> Bucket | None:
        """The bucket for a call with pictures of these lengths, if it is one for a graph."""
        if len(lengths) != 1:
            return None
        index = bisect_left(SIZES, lengths[0])
        return self.buckets[index] if index < len(SIZES) else None


def run(tower: Any, patches: torch.Tensor, grids: Sequence[tuple[int, int]]) -> torch.Tensor | None:
    """Final rows (n, dim) by a graph; None where there is none for these pictures."""
    if torch.cuda.is_current_stream_capturing():
        return None
    graphs = of(tower, patches)
    bucket = graphs.bucket([height * width for height, width in grids]) if graphs else None
    return bucket.run(patches, grids[0][1]) if bucket else None


def of(tower: Any, patches: torch.Tensor) -> Graphs | None:
    """The tower's graphs, captured now if this is the first call; None where there are none."""
    if not hasattr(tower, "_graphs"):
        tower._graphs = _make(tower, patches)
    found: Graphs | None = tower._graphs
    return found


def _make(tower: Any, patches: torch.Tensor) -> Graphs | None:
    heads, device = tower.config.n_heads, patches.device
    if os.environ.get(SWITCH) == "0" or tower.blocks[0].sharded or flash_version() is None:
        return None
    row = tower.patch_embed(patches[:1])
    if not fused.usable(row):
        return None
    pool, side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def attention(rows: int) -> flash.ForKeys:
        return flash.for_one(rows, heads, device)

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
        graphs = Graphs(tower, Places(SIZES[-1], patches, row), attention, capture)
    except RuntimeError as error:
        # Slower, not wrong: the same kernels run one by one.
        logger.warning("[vision-exp] no CUDA graphs for the tower: %s", error)
        return None
    logger.info("[vision-exp] tower graphs for %d row counts", len(graphs.buckets))
    return graphs
