"""The tower on a GPU: single images by CUDA graphs, captured once at start-up, others launched.

An image of 28x28 patches is a millisecond of arithmetic in nine launches per block, and launching
them takes several. So the whole tower, from patches to final rows, is captured for a fixed set of
row counts when it first runs: in vLLM's profile run, where its memory is counted. An image runs in
the next larger one: its patches first, then whatever lies there, which takes part in no image row's
attention. Several images packed into one call keep the device busy by themselves.

No graphs, so that all blocks are launched: for sharded towers (their all-reduce belongs into vLLM's
own capture), with VISION_EXP_TOWER_GRAPHS=0, and where a capture fails or its first replay does not
give the rows that launching gives.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from vision_exp import settings
from vision_exp.tower import backends, fused, trial
from vision_exp.tower.attention import ImageAttention, Kind, available_flash, on_device
from vision_exp.tower.backends import Backend
from vision_exp.tower.trial import Capture, Replay

#: Row counts to capture, for the smallest image that the transform makes to the largest. One less
#: than a multiple of 64, for which cuBLAS takes slower kernels (linear layers of a block at 3,200
#: rows: 135 microseconds, at 3,199: 123, on an H200).
SIZES = tuple(rows - 1 for rows in (*range(640, 2048, 128), *range(2048, 3329, 64)))

#: Largest relative distance of a first replay's rows from launched ones. Other kernels round BF16
#: differently, by some 0.02 after 32 blocks; wrong rows are off by about 1.
REPLAY_ERROR = 0.1

logger = logging.getLogger("vllm.vision_exp")


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

    The first call chooses the attention and captures the graphs: ``tower._backend`` and
    ``tower._graphs``.
    """
    capturing = torch.cuda.is_current_stream_capturing()
    if not hasattr(tower, "_backend") and not capturing:
        prepare(tower, patches, backends.kinds(patches.device, tower.flash or available_flash()))
    if hasattr(tower, "_graphs") and not capturing:
        bucket = find_bucket(tower._graphs, seqlens) if tower._graphs else None
        if bucket:
            return bucket.run(patches, grids[0][1])
    backend = getattr(tower, "_backend", None) or backends.select(patches.device)
    return launch(tower, patches, grids, seqlens, backend)


def launch(
    tower: Any,
    patches: torch.Tensor,
    grids: Sequence[tuple[int, int]],
    seqlens: Sequence[int],
    backend: Backend,
) -> torch.Tensor:
    """`run` kernel by kernel, with these parts."""
    x, rope = tower.patch_embed(patches), tower.rope(grids, patches.device)
    attend = backend.attention.packed
    return fused.run_blocks(tower, x, rope, lambda qkv: attend(qkv, seqlens), backend)


def find_bucket(buckets: Sequence[Bucket], seqlens: Sequence[int]) -> Bucket | None:
    """The bucket for a call with images of these lengths, if it is one for a graph."""
    if len(seqlens) != 1:
        return None
    index = bisect_left(SIZES, seqlens[0])
    return buckets[index] if index < len(SIZES) else None


def make_buckets(make: Callable[[int], Bucket], sizes: Sequence[int] = SIZES) -> list[Bucket]:
    """All buckets, made largest first, so that the smaller ones reuse its memory."""
    return [make(rows) for rows in reversed(sizes)][::-1]


def prepare(tower: Any, patches: torch.Tensor, kinds: Sequence[Kind]) -> None:
    """Chooses among these kinds of attention, and captures the graphs; see `run`."""
    wanted, side = settings.TOWER_GRAPHS.is_on(), torch.cuda.Stream()
    capture = capturing(side) if wanted else _run_once
    heads, dim = tower.blocks[0].attn.n_heads, tower.config.head_dim
    stage = trial.Stage(heads, dim, patches.device, capture, milliseconds)
    kind = trial.choose(kinds, stage)
    torch.cuda.empty_cache()  # what the trial's graphs held
    tower._backend = backends.select(patches.device, kind) if kind else Backend()
    tower._graphs = None
    if wanted and kind and not tower.blocks[0].sharded:
        capture = capturing(side, torch.cuda.graph_pool_handle())
        tower._graphs = capture_all(tower, patches, tower._backend, capture)


def capture_all(
    tower: Any,
    patches: torch.Tensor,
    backend: Backend,
    capture: Capture,
    sizes: Sequence[int] = SIZES,
) -> list[Bucket] | None:
    """Graphs for images of up to ``sizes`` rows; None, and why in the log, if they do not work.

    ``patches``: (n, 3, p, p), of which only kind and device matter.
    """
    try:
        static = StaticBuffers(sizes[-1], patches, tower.patch_embed(patches[:1]))

        def make(rows: int) -> Bucket:
            heads = tower.blocks[0].attn.n_heads
            attention = backend.attention.image(rows, heads, patches.device)
            return Bucket(tower, rows, static, attention, backend, capture)

        buckets = make_buckets(make, sizes)
        errors = torch.stack([_replay_error(tower, b, patches, backend) for b in buckets]).tolist()
        wrong = [f"{b.rows}: {e:.2g}" for b, e in zip(buckets, errors, strict=True) if not _near(e)]
        if wrong:
            raise ReplayError(f"rows of replays differ from launched ones ({', '.join(wrong)})")
    except Exception as error:  # noqa: BLE001  slower, not wrong: the same kernels run one by one
        kind = type(error).__name__
        logger.warning("[vision-exp] no CUDA graphs for the tower: %s: %s", kind, error)
        return None
    logger.info("[vision-exp] tower graphs for %d row counts", len(buckets))
    return buckets


class ReplayError(RuntimeError):
    """A captured tower gives other rows than the launched one."""


def _near(error: float) -> bool:
    return error <= REPLAY_ERROR  # NaN is not


def _replay_error(tower: Any, bucket: Bucket, like: torch.Tensor, backend: Backend) -> torch.Tensor:
    """Relative distance of a bucket's first replay from the launched rows, on the device."""
    width = min(33, bucket.rows)  # no multiple of anything, so that rows are left behind the image
    grid = (bucket.rows // width, width)
    count = grid[0] * grid[1]
    random = torch.Generator(like.device).manual_seed(bucket.rows)
    patches = torch.rand((count, *like.shape[1:]), device=like.device, generator=random)
    patches = patches.mul_(2).sub_(1).to(like.dtype)
    expected = launch(tower, patches, [grid], [count], backend).float()
    return (bucket.run(patches, width).float() - expected).norm() / expected.norm()


def _run_once(work: Callable[[], None]) -> Replay:
    work()
    return work


def milliseconds(replay: Replay) -> float:
    """The faster of two runs, on the device's clock, after one to warm up."""
    replay()
    times = []
    for _ in range(2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)


def capturing(side: torch.cuda.Stream, pool: Any = None) -> Capture:
    """Captures CUDA graphs on a stream of their own, which share a memory pool if there is one."""
    return partial(_capture, side=side, pool=pool)


def _capture(work: Callable[[], None], *, side: torch.cuda.Stream, pool: Any) -> Replay:
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
