"""Full attention inside each picture on a GPU: vLLM's FlashAttention, else torch's own.

FlashAttention 3 hands out work in tiles of 192 rows of one head, and every tile of a picture takes
the same time. 3,108 rows of 16 heads are 272 tiles: on 132 multiprocessors two full rounds, then a
third for the last 8. So the rows that fill whole rounds go in one call, and what is left in a
second one that shares each tile's keys among several multiprocessors: 103 instead of 134
microseconds on an H200.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate

import torch
from torch.nn import functional as F

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.v1.attention.backends.fa_utils:flash_attn_varlen_func",
    "vllm.v1.attention.backends.fa_utils:get_flash_attn_version",
)

#: Rows of a tile in FlashAttention 3 for heads of at most 64 values (its `tile_size_fwd_sm90`).
TILE = 192
#: More tiles per head than this are not worth a second call (measured on an H200).
MOST_LEFT = 2

#: qkv (n, 3, heads, d) and the rows of each picture, to (n, heads * d).
Attend = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
#: qkv (n, 3, heads, d) of one picture and its [0, length] on the device, int32, to (n, heads * d).
#: Rows from `length` on are nobody's keys.
AttendOne = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Share:
    """Rows ``start`` to ``stop`` in one call that shares the keys of a tile ``splits`` ways."""

    start: int
    stop: int
    splits: int


def shares(rows: int, heads: int, processors: int) -> list[Share]:
    """How the query rows of one picture are called on a card of so many multiprocessors."""
    tiles = -(-rows // TILE)
    full = tiles * heads // processors * processors // heads
    left = tiles - full
    if not full or not 0 < left <= MOST_LEFT:
        return [Share(0, rows, 1)]
    splits = max(1, processors // (left * heads))
    return [Share(0, full * TILE, 1), Share(full * TILE, rows, splits)]


@cache
def flash_version() -> int | None:
    """Version of vLLM's FlashAttention for this card; None if there is none."""
    try:
        from vllm.v1.attention.backends.fa_utils import (
            flash_attn_varlen_func,  # noqa: F401  (missing where there is none)
            get_flash_attn_version,
        )
    except ImportError:
        return None
    version: int | None = get_flash_attn_version()
    return version


@lru_cache(maxsize=64)
def for_one(rows: int, heads: int, device: torch.device) -> AttendOne:
    """FlashAttention (there must be one) of one picture that lies in ``rows`` rows.

    Its length comes from the device, so the call can be captured for pictures of several lengths.
    """
    version = flash_version()
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    parts = [Share(0, rows, 1)]
    if version == 3:
        properties = torch.cuda.get_device_properties(device)
        parts = shares(rows, heads, properties.multi_processor_count)
    edges = [_edges((part.stop - part.start,), device) for part in parts]

    def flash_attention(qkv: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.unbind(1)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for part, queries in zip(parts, edges, strict=True):
            flash_attn_varlen_func(
                q=q[part.start : part.stop],
                k=k,
                v=v,
                cu_seqlens_q=queries,
                cu_seqlens_k=keys,
                max_seqlen_q=part.stop - part.start,
                max_seqlen_k=rows,
                causal=False,
                fa_version=version,
                num_splits=part.splits,
                out=out[part.start : part.stop],
            )
        return out.flatten(1)

    return flash_attention


def best() -> Attend:
    """Attention of packed pictures: vLLM's FlashAttention where it is there, else torch's own."""
    version = flash_version()
    if version is None:
        return by_torch
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    def flash_attention(qkv: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        edges = _edges(lengths, qkv.device)
        if len(lengths) == 1:
            return for_one(lengths[0], qkv.shape[2], qkv.device)(qkv, edges)
        q, k, v = qkv.unbind(1)
        out = flash_attn_varlen_func(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=edges,
            cu_seqlens_k=edges,
            max_seqlen_q=max(lengths),
            max_seqlen_k=max(lengths),
            causal=False,
            fa_version=version,
            num_splits=1,  # its own choice splits small pictures and takes half as long again
        )
        return out.flatten(1)

    return flash_attention


def _edges(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Row numbers at which the pictures begin, and the end: int32 (pictures + 1,)."""
    return on_device((0, *accumulate(lengths)), device)


@lru_cache(maxsize=128)
def on_device(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Int32 numbers on the device, copied there once and without waiting. Not to be written."""
    host = torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def by_torch(qkv: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Full attention inside each picture: (n, 3, heads, d) to (n, heads * d)."""
    parts = []
    for rows in qkv.split(list(lengths)):
        q, k, v = rows.permute(1, 2, 0, 3)[:, None].unbind(0)  # (1, heads, n, d)
        parts.append(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
