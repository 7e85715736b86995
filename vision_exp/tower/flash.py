"""Attention of one picture in whole rounds of FlashAttention 3, on Hopper.

FlashAttention 3 hands out work in tiles of 192 rows of one head, one to a multiprocessor, and every
tile of a picture takes the same time. 3,108 rows of 16 heads are 272 tiles: on 132 multiprocessors
two full rounds, then a third for the last 8. So FlashAttention gets the rows that fit into whole
rounds, and the rows that are left go to tower_rest.py, beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from vision_exp.tower import split_kv
from vision_exp.tower.device import flash_version, on_device, processors, second_stream

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.v1.attention.backends.fa_utils:flash_attn_varlen_func",
    "vllm.v1.attention.backends.fa_utils:get_scheduler_metadata",
)

#: Rows of a tile in FlashAttention 3 for heads of at most 64 values (its `tile_size_fwd_sm90`).
TILE = 192
#: More rows than this are better left to a last round of FlashAttention (measured on an H200).
MOST_LEFT = 512

#: qkv (n, 3, heads, d) of one picture to (n, heads * d).
AttendOne = Callable[[torch.Tensor], torch.Tensor]
#: [0, length] of a picture, int32 on the device, to the attention of its blocks. Rows from `length`
#: on are nobody's keys.
ForKeys = Callable[[torch.Tensor], AttendOne]


@dataclass(frozen=True)
class Rounds:
    """The first ``rows`` rows fill whole rounds of tiles and leave ``idle`` multiprocessors
    without a tile in the last of them."""

    rows: int
    idle: int


def whole_rounds(rows: int, heads: int, processors: int) -> Rounds:
    """How FlashAttention gets a picture on a card of so many multiprocessors.

    All rows in one call where that is as good.

    >>> whole_rounds(3108, 16, 132)
    Rounds(rows=3072, idle=8)
    """
    tiles = -(-rows // TILE)
    slots = tiles * heads // processors * processors
    fitting = slots // heads * TILE
    if not 0 < rows - fitting <= MOST_LEFT or not fitting:
        return Rounds(rows, 0)
    return Rounds(fitting, slots % heads)


class OneAttention:
    """FlashAttention (there must be one) of one picture that lies in ``rows`` rows.

    Its length comes from the device, so all can be captured for pictures of several lengths. Who
    captures keeps this object: the graph goes on using what it holds.
    """

    def __init__(self, rows: int, heads: int, device: torch.device) -> None:
        self.rows, self.heads, self.version = rows, heads, flash_version()
        rounds, cores = Rounds(rows, 0), processors(device)
        if self.version == 3:
            rounds = whole_rounds(rows, heads, cores)
        self.first = rounds.rows
        self.queries = on_device((0, self.first), device)
        shares = split_kv.shares(rows - self.first, heads, cores, rounds.idle)
        self.rest = split_kv.Rest(self.first, rows, heads, shares, device)
        self.beside = second_stream(device)

    def __call__(self, keys: torch.Tensor) -> AttendOne:
        """Attention of all blocks over the same keys."""
        schedule: list[torch.Tensor | None] = []

        def attend(qkv: torch.Tensor) -> torch.Tensor:
            if not schedule:
                schedule.append(self._schedule(qkv, keys))
            out = qkv.new_empty((self.rows, *qkv.shape[2:]))
            if self.first == self.rows:
                self._flash(qkv, keys, out, schedule[0])
                return out.flatten(1)
            here = torch.cuda.current_stream(qkv.device)
            self.beside.wait_stream(here)
            # First, so that its tiles get all multiprocessors.
            self._flash(qkv, keys, out, schedule[0])
            with torch.cuda.stream(self.beside):
                self.rest(qkv, keys, out)
            here.wait_stream(self.beside)
            return out.flatten(1)

        return attend

    def _schedule(self, qkv: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        """FlashAttention 3's plan, which every block would make anew."""
        if self.version != 3:
            return None
        from vllm.v1.attention.backends.fa_utils import get_scheduler_metadata

        schedule: torch.Tensor | None = get_scheduler_metadata(
            batch_size=1,
            max_seqlen_q=self.first,
            max_seqlen_k=self.rows,
            num_heads_q=self.heads,
            num_heads_kv=self.heads,
            headdim=qkv.shape[-1],
            cache_seqlens=keys[1:],
            qkv_dtype=qkv.dtype,
            cu_seqlens_q=self.queries,
            num_splits=1,
        )
        return schedule

    def _flash(
        self,
        qkv: torch.Tensor,
        keys: torch.Tensor,
        out: torch.Tensor,
        schedule: torch.Tensor | None,
    ) -> None:
        """The rows of the whole rounds, into ``out``."""
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        q, k, v = qkv.unbind(1)
        flash_attn_varlen_func(
            q=q[: self.first],
            k=k,
            v=v,
            cu_seqlens_q=self.queries,
            cu_seqlens_k=keys,
            max_seqlen_q=self.first,
            max_seqlen_k=self.rows,
            causal=False,
            fa_version=self.version,
            num_splits=1,
            scheduler_metadata=schedule,
            out=out[: self.first],
        )


#: Made once for each number of rows.
for_one = lru_cache(maxsize=64)(OneAttention)
