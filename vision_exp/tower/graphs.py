"""The tower on a GPU: single images by CUDA graphs, captured once at start-up, others launched.

An image of 28x28 patches is a millisecond of arithmetic in nine launches per block, and launching
them takes several. So the whole tower, from patches to final rows, is captured for a fixed set of
row counts when it first runs: in vLLM's profile run, where its memory is counted. An image runs in
the next larger one: its patches first, then whatever lies there, which takes part in no image row's
attention. Several images packed into one call keep the device busy by themselves.

No graphs, so that all blocks are launched: for sharded towers (their all-reduce belongs into vLLM's
own capture), on GPUs for which vLLM has no FlashAttention, with VISION_EXP_TOWER_GRAPHS=0.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from vision_exp import settings
from vision_exp.tower import backends, fused
from vision_exp.tower.attention import ImageAttention, on_device
from vision_exp.tower.backends import Backend

#: Row counts to capture, for the smallest image that the transform makes to the largest. One less
#: than a multiple of 64, for which cuBLAS takes slower kernels (linear layers of a block at 3,200
#: rows: 135 microseconds, at 3,199: 123, on an H200).
SIZES = tuple(rows - 1 for rows in (*range(640, 2048, 128), *range(2048, 3329, 64)))

logger = logging.getLogger("vllm.vision_exp")

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]


class StaticBuffers:
    """Where replays read and write, on the device; all graphs use the same, one after the other."""

    def __init__(self, rows: int, patches: torch.Tensor, out: torch.Tensor) -> None:
        with torch.inference_mode(False):
            values = fused.aligned(patches.shape[1:].numel())
            self.patches = patches.new_zeros((rows, values))
            self.shape = torch.tensor([0, rows, 1], dtype=torch.int32, device=patches.device)
            self.cu_seqlens_k = self.shape[:2]  # [0, rows of the image]
            self.width = self.shape[2:]  # [columns of the image's grid]
            self.out = out.new_empty((rows, *out.shape[1:]))

    def copy_inputs(self, patches: torch.Tensor, width: int) -> None:
        """Puts one image in place. No synchronisation."""
        flat = patches.flatten(1)
        self.patches[: len(flat), : flat.shape[1]].copy_(flat)
        self.set_grid(len(patches), width)

    def set_grid(self, rows: int, width: int) -> None:
        """Says how many rows the image has, and columns its grid."""
        self.shape.copy_(on_device((0, rows, width), self.shape.device))


class Bucket:
    """The captured tower for an image of at most ``rows`` patches."""

    def __init__(
        self,
        tower: Any,
        rows: int,
        static: StaticBuffers,
        attention: ImageAttention,
        backend: Backend,
        capture: Capture,
    ) -> None:
        self.rows, self.static = rows, static
        self.attention = attention  # the graph goes on using what it holds

        def work() -> None:
            x = fused.embed(static.patches[:rows], tower.patch_embed.proj)
            axes = tower.rope.axis_tables(x.device)
            cos, sin = (fused.expand_rope_table(axis, static.width, rows) for axis in axes)
            attend = attention(static.cu_seqlens_k)
            static.out[:rows].copy_(fused.run_blocks(tower, x, (cos, sin), attend, backend))

        # FlashAttention 2 takes the length at its word: that of a larger image would have it read
        # behind the rows while the graph is made.
        static.set_grid(rows, 1)
        self.replay = capture(work)

    def run(self, patches: torch.Tensor, width: int) -> torch.Tensor:
        """Final rows (n, dim) of one image's patches (n, 3, p, p). No synchronisation."""
        self.static.copy_inputs(patches, width)
        self.replay()
        return self.static.out[: len(patches)].clone()


def run(
    tower: Any, patches: torch.Tensor, grids: Sequence[tuple[int, int]], seqlens: Sequence[int]
) -> torch.Tensor:
    """Final rows (n, dim) of packed images' patches (n, 3, p, p), for a tower that fused supports.

    The first call captures the graphs, as ``tower._graphs``.
    """
    backend = backends.select(patches.device)
    if not torch.cuda.is_current_stream_capturing():
        if not hasattr(tower, "_graphs"):
            tower._graphs = _capture_all(tower, patches, backend)
        bucket = find_bucket(tower._graphs, seqlens) if tower._graphs else None
        if bucket:
            return bucket.run(patches, grids[0][1])
    x, rope = tower.patch_embed(patches), tower.rope(grids, patches.device)
    return fused.run_blocks(tower, x, rope, lambda qkv: backend.attend(qkv, seqlens), backend)


def find_bucket(buckets: Sequence[Bucket], seqlens: Sequence[int]) -> Bucket | None:
    """The bucket for a call with images of these lengths, if it is one for a graph."""
    if len(seqlens) != 1:
        return None
    index = bisect_left(SIZES, seqlens[0])
    return buckets[index] if index < len(SIZES) else None


def make_buckets(make: Callable[[int], Bucket]) -> list[Bucket]:
    """All buckets, made largest first, so that the smaller ones reuse its memory."""
    return [make(rows) for rows in reversed(SIZES)][::-1]


def _capture_all(tower: Any, patches: torch.Tensor, backend: Backend) -> list[Bucket] | None:
    attend_image = backend.attend_image
    if not settings.TOWER_GRAPHS.is_on() or tower.blocks[0].sharded or attend_image is None:
        return None
    row = tower.patch_embed(patches[:1])
    capture = partial(_capture, pool=torch.cuda.graph_pool_handle(), side=torch.cuda.Stream())
    try:
        static = StaticBuffers(SIZES[-1], patches, row)

        def make(rows: int) -> Bucket:
            attention = attend_image(rows, tower.config.n_heads, patches.device)
            return Bucket(tower, rows, static, attention, backend, capture)

        buckets = make_buckets(make)
    except RuntimeError as error:
        # Slower, not wrong: the same kernels run one by one.
        logger.warning("[vision-exp] no CUDA graphs for the tower: %s", error)
        return None
    logger.info("[vision-exp] tower graphs for %d row counts", len(buckets))
    return buckets


def _capture(work: Callable[[], None], *, pool: Any, side: torch.cuda.Stream) -> Replay:
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
