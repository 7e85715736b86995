"""Attention of an image, or of its tail rows, by a kernel of our own.

All rows: where vLLM has no FlashAttention, or a slower one. Tail rows: what FlashAttention 3's full
waves leave (hopper/waves.py). If those are too many for the SMs that it leaves idle, the keys of a
tile are split among several programs (CTAs), and the last of them to arrive combines their sums: a
short time on the whole GPU. Flash-decoding (https://pytorch.org/blog/flash-decoding/), with the
online softmax of https://arxiv.org/abs/1805.02867 and the combination in the same launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vision_exp.tower.attention import ImageAttention, Kind, cu_seqlens


class Tile(NamedTuple):
    """Rows and keys of a program's steps, its warps, and the steps whose loads are under way."""

    rows: int
    keys: int
    warps: int
    stages: int


TAIL = Tile(64, 128, 4, 3)
#: Of all rows. The second takes the shared memory that every GPU from SM80 on has.
WHOLE = (TAIL, Tile(128, 64, 8, 2))
CTAS_PER_SM = 2
MAX_SPLITS = 8


@triton.jit
def _online_softmax_update(q, k, v, inside, m_i, l_i, acc, qk_scale, ALL: tl.constexpr):
    """Some more keys, all of them or those ``inside``: the running maximum of the scores in base 2,
    the sum of their weights and the weighted sum of values."""
    qk = tl.dot(q, k)
    if not ALL:
        qk = tl.where(inside[None, :], qk, -float("inf"))
    m_new = tl.maximum(m_i, tl.max(qk, axis=1) * qk_scale)
    p = tl.exp2(qk * qk_scale - m_new[:, None])
    alpha = tl.exp2(m_i - m_new)
    l_i = l_i * alpha + tl.sum(p, axis=1)
    return m_new, l_i, tl.dot(p.to(v.dtype), v, acc * alpha[:, None])


@triton.jit
def _combine(acc_ptr, ml_ptr, out, inside, tile, tiles, DIM: tl.constexpr, BLOCK_M: tl.constexpr):
    """All splits of a tile, read from memory in their order, to its rows of the result."""
    column = tl.arange(0, DIM)
    m_i = tl.full((BLOCK_M,), -1e30, tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, DIM), tl.float32)
    for split in range(tl.num_programs(2)):
        row = (split * tiles + tile) * BLOCK_M + tl.arange(0, BLOCK_M)
        m_split = tl.load(ml_ptr + 2 * row)
        m_new = tl.maximum(m_i, m_split)
        alpha, beta = tl.exp2(m_i - m_new), tl.exp2(m_split - m_new)
        l_i = l_i * alpha + tl.load(ml_ptr + 2 * row + 1) * beta
        acc_split = tl.load(acc_ptr + row[:, None] * DIM + column[None, :])
        acc = acc * alpha[:, None] + acc_split * beta[:, None]
        m_i = m_new
    value = (acc / l_i[:, None]).to(out.dtype.element_ty)
    tl.store(out, value, mask=inside[:, None])


# Not compiled anew for a number of rows that is a multiple of 16, or one.
@triton.jit(do_not_specialize=["start", "rows"])
def _tail_rows_kernel(
    qkv_ptr,
    cu_seqlens_k_ptr,
    out_ptr,
    acc_ptr,
    ml_ptr,
    semaphore_ptr,
    start,
    rows,
    qk_scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    head, split = tl.program_id(1), tl.program_id(2)
    stride: tl.constexpr = 3 * HEADS * DIM
    row, column = start + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, DIM)
    seqlen = tl.minimum(tl.load(cu_seqlens_k_ptr + 1), rows)
    keys_per_split = tl.cdiv(tl.cdiv(seqlen, tl.num_programs(2)), BLOCK_N) * BLOCK_N
    begin = tl.minimum(split * keys_per_split, seqlen)
    end = tl.minimum(begin + keys_per_split, seqlen)
    head_ptr = qkv_ptr + head * DIM
    q = tl.load(
        head_ptr + row[:, None] * stride + column[None, :], mask=row[:, None] < rows, other=0.0
    )
    key = tl.arange(0, BLOCK_N)
    k_ptr = head_ptr + HEADS * DIM + key[None, :] * stride + column[:, None]
    v_ptr = head_ptr + 2 * HEADS * DIM + key[:, None] * stride + column[None, :]
    m_i = tl.full((BLOCK_M,), -1e30, tl.float32)  # finite: a split may have no keys
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, DIM), tl.float32)
    full = begin + (end - begin) // BLOCK_N * BLOCK_N
    for at in range(begin, full, BLOCK_N):
        k, v = tl.load(k_ptr + at * stride), tl.load(v_ptr + at * stride)
        m_i, l_i, acc = _online_softmax_update(q, k, v, key, m_i, l_i, acc, qk_scale, True)
    if full < end:
        inside = full + key < end
        k = tl.load(k_ptr + full * stride, mask=inside[None, :], other=0.0)
        v = tl.load(v_ptr + full * stride, mask=inside[:, None], other=0.0)
        m_i, l_i, acc = _online_softmax_update(q, k, v, inside, m_i, l_i, acc, qk_scale, False)
    out = out_ptr + (row[:, None] * HEADS + head) * DIM + column[None, :]
    if tl.num_programs(2) > 1:
        tile = head * tl.num_programs(0) + tl.program_id(0)
        tiles = HEADS * tl.num_programs(0)
        kept = (split * tiles + tile) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(acc_ptr + kept[:, None] * DIM + column[None, :], acc)
        tl.store(ml_ptr + 2 * kept, m_i)
        tl.store(ml_ptr + 2 * kept + 1, l_i)
        tl.debug_barrier()  # all of it is written before the program says so
        if tl.atomic_add(semaphore_ptr + tile, 1) == tl.num_programs(2) - 1:
            tl.store(semaphore_ptr + tile, 0)
            _combine(acc_ptr, ml_ptr, out, row < rows, tile, tiles, DIM, BLOCK_M)
    else:
        value = (acc / l_i[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out, value, mask=row[:, None] < rows)


def num_splits(rows: int, heads: int, num_sms: int, idle: int) -> int:
    """Programs that share the keys of each tile; 1 if the ``idle`` SMs can take all tiles."""
    tiles = triton.cdiv(rows, TAIL.rows) * heads
    if tiles <= CTAS_PER_SM * idle:
        return 1
    return min(max(1, CTAS_PER_SM * num_sms // tiles), MAX_SPLITS)


class TailRows:
    """Attention of the rows from ``start`` on of images that lie in ``rows`` rows.

    One call at a time: the programs of a tile count in its semaphore which of them is the last.
    """

    def __init__(
        self,
        start: int,
        rows: int,
        heads: int,
        num_splits: int,
        device: torch.device,
        tile: Tile = TAIL,
    ) -> None:
        self.start, self.num_splits, self.tile = start, num_splits, tile
        self.tiles = triton.cdiv(rows - start, tile.rows)
        with torch.inference_mode(False):
            self.semaphore = torch.zeros(self.tiles * heads, dtype=torch.int32, device=device)

    def __call__(self, qkv: torch.Tensor, cu_seqlens_k: torch.Tensor, out: torch.Tensor) -> None:
        """Puts the rows into ``out`` (n, heads, d).

        ``qkv``: (n, 3, heads, d), contiguous, d a power of two; ``cu_seqlens_k``: [0, number of
        keys], int32, read on the device; no more than n are read.
        """
        rows, _, heads, dim = qkv.shape
        partial = (
            self.num_splits * heads * self.tiles * self.tile.rows if self.num_splits > 1 else 0
        )
        acc = torch.empty((partial, dim), dtype=torch.float32, device=qkv.device)
        ml = torch.empty((partial, 2), dtype=torch.float32, device=qkv.device)
        _tail_rows_kernel[(self.tiles, heads, self.num_splits)](
            qkv,
            cu_seqlens_k,
            out,
            acc,
            ml,
            self.semaphore,
            self.start,
            rows,
            dim**-0.5 * math.log2(math.e),
            HEADS=heads,
            DIM=dim,
            BLOCK_M=self.tile.rows,
            BLOCK_N=self.tile.keys,
            num_warps=self.tile.warps,
            num_stages=self.tile.stages,
        )


def image(tile: Tile, rows: int, heads: int, device: torch.device) -> ImageAttention:
    """Attention of one image of at most ``rows`` rows, all of which are computed."""
    every = TailRows(0, rows, heads, 1, device, tile)

    def attend(keys: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
        out = qkv.new_empty((rows, *qkv.shape[2:]))
        every(qkv, keys, out)
        return out.flatten(1)

    return lambda keys: partial(attend, keys)


def packed(tile: Tile, qkv: torch.Tensor, seqlens: Sequence[int]) -> torch.Tensor:
    """Full attention inside each image: (n, 3, heads, d) to (n, heads * d)."""
    parts = [
        image(tile, length, qkv.shape[2], qkv.device)(cu_seqlens((length,), qkv.device))(rows)
        for length, rows in zip(seqlens, qkv.split(list(seqlens)), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def kinds() -> list[Kind]:
    """One for each tile of `WHOLE`."""
    return [
        Kind(f"Triton {tile.rows}x{tile.keys}", partial(packed, tile), partial(image, tile))
        for tile in WHOLE
    ]
