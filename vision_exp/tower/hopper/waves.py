"""Attention of one image in full waves of FlashAttention 3, its tail rows by a kernel of our own.

FlashAttention 3 (https://arxiv.org/abs/2407.08608) hands out tiles of 192 rows of one head, one to
an SM, and every tile of an image takes the same time. 3,108 rows of 16 heads are 272 tiles: on 132
SMs two full waves, then a third for the last 8 (wave quantisation,
https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html#wave-quant).
So FlashAttention gets the rows that fit into full waves, and ../split_kv.py the tail, beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from vision_exp.tower import split_kv
from vision_exp.tower.attention import Attend, Kind, cu_seqlens, flash, flash_packed

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = ("vllm.v1.attention.backends.fa_utils:get_scheduler_metadata",)

FLASH_VERSION = 3
#: Rows of a tile in FlashAttention 3 for heads of at most 64 values (its `tile_size_fwd_sm90`).
TILE = 192
#: More tail rows than this are better left to a last wave of FlashAttention (measured, H200).
MAX_TAIL = 512


@dataclass(frozen=True)
class Waves:
    """The first ``rows`` rows fill whole waves of tiles and leave ``idle`` SMs without a tile in
    the last of them."""

    rows: int
    idle: int


def full_waves(rows: int, heads: int, num_sms: int) -> Waves:
    """How FlashAttention gets an image on a GPU of so many SMs.

    All rows in one call where that is as good.

    >>> full_waves(3108, 16, 132)
    Waves(rows=3072, idle=8)
    """
    tiles = -(-rows // TILE)
    slots = tiles * heads // num_sms * num_sms
    fitting = slots // heads * TILE
    if not 0 < rows - fitting <= MAX_TAIL or not fitting:
        return Waves(rows, 0)
    return Waves(fitting, slots % heads)


class WavesAttention:
    """Attention of one image that lies in ``rows`` rows; an `ImageAttention`.

    Its length comes from the device, so all can be captured for images of several lengths. Who
    captures keeps this object: the graph goes on using what it holds.
    """

    def __init__(self, rows: int, heads: int, device: torch.device) -> None:
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        waves = full_waves(rows, heads, num_sms)
        self.rows, self.heads, self.first = rows, heads, waves.rows
        self.cu_seqlens_q = cu_seqlens((waves.rows,), device)
        self.side = _side_stream(device)
        self.tail = None
        if waves.rows < rows:
            splits = split_kv.num_splits(rows - waves.rows, heads, num_sms, waves.idle)
            self.tail = split_kv.TailRows(waves.rows, rows, heads, splits, device)

    def __call__(self, cu_seqlens_k: torch.Tensor) -> Attend:
        schedule: list[torch.Tensor] = []

        def attend(qkv: torch.Tensor) -> torch.Tensor:
            if not schedule:
                schedule.append(self._schedule(qkv, cu_seqlens_k))
            out = qkv.new_empty((self.rows, *qkv.shape[2:]))
            current = torch.cuda.current_stream(qkv.device)
            if self.tail:
                self.side.wait_stream(current)
            # First, so that its tiles get all SMs.
            flash(
                FLASH_VERSION,
                qkv,
                self.cu_seqlens_q,
                cu_seqlens_k,
                (self.first, self.rows),
                self.first,
                scheduler_metadata=schedule[0],
                out=out[: self.first],
            )
            if self.tail:
                with torch.cuda.stream(self.side):
                    self.tail(qkv, cu_seqlens_k, out)
                current.wait_stream(self.side)
            return out.flatten(1)

        return attend

    def _schedule(self, qkv: torch.Tensor, cu_seqlens_k: torch.Tensor) -> torch.Tensor:
        """FlashAttention 3's plan, which every block would make anew."""
        from vllm.v1.attention.backends.fa_utils import get_scheduler_metadata

        schedule: torch.Tensor = get_scheduler_metadata(
            batch_size=1,
            max_seqlen_q=self.first,
            max_seqlen_k=self.rows,
            num_heads_q=self.heads,
            num_heads_kv=self.heads,
            headdim=qkv.shape[-1],
            cache_seqlens=cu_seqlens_k[1:],
            qkv_dtype=qkv.dtype,
            cu_seqlens_q=self.cu_seqlens_q,
            num_splits=1,
        )
        return schedule


#: Made once for each number of rows.
attend_image = lru_cache(maxsize=64)(WavesAttention)


def attend(qkv: torch.Tensor, seqlens: Sequence[int]) -> torch.Tensor:
    """Full attention inside each image: (n, 3, heads, d) to (n, heads * d)."""
    if len(seqlens) > 1:
        return flash_packed(FLASH_VERSION, qkv, seqlens)
    keys = cu_seqlens(seqlens, qkv.device)
    return attend_image(seqlens[0], qkv.shape[2], qkv.device)(keys)(qkv)


KIND = Kind("FlashAttention 3 in full waves", attend, attend_image)


@lru_cache(maxsize=8)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream for work beside the current one's; whoever uses it joins it again."""
    return torch.cuda.Stream(device)
