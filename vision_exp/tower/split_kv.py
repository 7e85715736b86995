"""Attention of the rows of a picture that FlashAttention's whole rounds leave (tower_rounds.py).

Tiles of 64 rows. If they are too many for the multiprocessors that FlashAttention leaves idle, the
keys of a tile are shared among several programs, and the last of them joins their sums: a short
time on the whole card.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

TILE = 64
KEYS = 128
#: Programs that a multiprocessor runs at a time, and the most that share the keys of a tile.
PROGRAMS = 2
MOST_SHARES = 8


@triton.jit
def _take_in(q, k, v, inside, top, total, sums, factor, ALL: tl.constexpr):
    """Some more keys, all of them or those ``inside``: the running maximum of the scores in base 2,
    the sum of their weights and the weighted sum of values."""
    score = tl.dot(q, k)
    if not ALL:
        score = tl.where(inside[None, :], score, -float("inf"))
    higher = tl.maximum(top, tl.max(score, axis=1) * factor)
    weight = tl.exp2(score * factor - higher[:, None])
    fade = tl.exp2(top - higher)
    total = total * fade + tl.sum(weight, axis=1)
    return higher, total, tl.dot(weight.to(v.dtype), v, sums * fade[:, None])


@triton.jit
def _join(sums_ptr, scales_ptr, out, inside, tile, tiles, DIM: tl.constexpr, TILE: tl.constexpr):
    """All shares of a tile, read from memory in their order, to its rows of the result."""
    column = tl.arange(0, DIM)
    top = tl.full((TILE,), -1e30, tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    sums = tl.zeros((TILE, DIM), tl.float32)
    for share in range(tl.num_programs(2)):
        place = (share * tiles + tile) * TILE + tl.arange(0, TILE)
        its_top = tl.load(scales_ptr + 2 * place)
        higher = tl.maximum(top, its_top)
        fade, weight = tl.exp2(top - higher), tl.exp2(its_top - higher)
        total = total * fade + tl.load(scales_ptr + 2 * place + 1) * weight
        its_sums = tl.load(sums_ptr + place[:, None] * DIM + column[None, :])
        sums = sums * fade[:, None] + its_sums * weight[:, None]
        top = higher
    value = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out, value, mask=inside[:, None])


@triton.jit
def _rest_kernel(
    qkv_ptr,
    keys_ptr,
    out_ptr,
    sums_ptr,
    scales_ptr,
    arrived_ptr,
    start,
    rows,
    factor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
):
    head, share = tl.program_id(1), tl.program_id(2)
    stride: tl.constexpr = 3 * HEADS * DIM
    row, column = start + tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, DIM)
    length = tl.minimum(tl.load(keys_ptr + 1), rows)
    each = tl.cdiv(tl.cdiv(length, tl.num_programs(2)), KEYS) * KEYS
    begin = tl.minimum(share * each, length)
    end = tl.minimum(begin + each, length)
    head_ptr = qkv_ptr + head * DIM
    q = tl.load(
        head_ptr + row[:, None] * stride + column[None, :], mask=row[:, None] < rows, other=0.0
    )
    key = tl.arange(0, KEYS)
    k_ptr = head_ptr + HEADS * DIM + key[None, :] * stride + column[:, None]
    v_ptr = head_ptr + 2 * HEADS * DIM + key[:, None] * stride + column[None, :]
    top = tl.full((TILE,), -1e30, tl.float32)  # finite: a share may have no keys
    total = tl.zeros((TILE,), tl.float32)
    sums = tl.zeros((TILE, DIM), tl.float32)
    full = begin + (end - begin) // KEYS * KEYS
    for at in range(begin, full, KEYS):
        k, v = tl.load(k_ptr + at * stride), tl.load(v_ptr + at * stride)
        top, total, sums = _take_in(q, k, v, key, top, total, sums, factor, True)
    if full < end:
        inside = full + key < end
        k = tl.load(k_ptr + full * stride, mask=inside[None, :], other=0.0)
        v = tl.load(v_ptr + full * stride, mask=inside[:, None], other=0.0)
        top, total, sums = _take_in(q, k, v, inside, top, total, sums, factor, False)
    out = out_ptr + (row[:, None] * HEADS + head) * DIM + column[None, :]
    if tl.num_programs(2) > 1:
        tile = head * tl.num_programs(0) + tl.program_id(0)
        tiles = HEADS * tl.num_programs(0)
        place = (share * tiles + tile) * TILE + tl.arange(0, TILE)
        tl.store(sums_ptr + place[:, None] * DIM + column[None, :], sums)
        tl.store(scales_ptr + 2 * place, top)
        tl.store(scales_ptr + 2 * place + 1, total)
        tl.debug_barrier()  # all of it is written before the program says so
        if tl.atomic_add(arrived_ptr + tile, 1) == tl.num_programs(2) - 1:
            tl.store(arrived_ptr + tile, 0)
            _join(sums_ptr, scales_ptr, out, row < rows, tile, tiles, DIM, TILE)
    else:
        value = (sums / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out, value, mask=row[:, None] < rows)


def shares(rows: int, heads: int, processors: int, idle: int) -> int:
    """Programs that share the keys of each tile; 1 if the ``idle`` multiprocessors can take all."""
    tiles = triton.cdiv(rows, TILE) * heads
    if tiles <= PROGRAMS * idle:
        return 1
    return min(max(1, PROGRAMS * processors // tiles), MOST_SHARES)


class Rest:
    """Attention of the rows from ``start`` on of pictures that lie in ``rows`` rows.

    One call at a time: the programs of a tile count in the same place which of them is the last.
    """

    def __init__(
        self, start: int, rows: int, heads: int, shares: int, device: torch.device
    ) -> None:
        self.start, self.shares = start, shares
        self.tiles = triton.cdiv(rows - start, TILE)
        with torch.inference_mode(False):
            self.arrived = torch.zeros(self.tiles * heads, dtype=torch.int32, device=device)

    def __call__(self, qkv: torch.Tensor, keys: torch.Tensor, out: torch.Tensor) -> None:
        """Puts the rows into ``out`` (n, heads, d).

        ``qkv``: (n, 3, heads, d), contiguous, d a power of two; ``keys``: [0, number of keys],
        int32, read on the device; no more than n are read.
        """
        rows, _, heads, dim = qkv.shape
        places = self.shares * heads * self.tiles * TILE if self.shares > 1 else 0
        sums = torch.empty((places, dim), dtype=torch.float32, device=qkv.device)
        scales = torch.empty((places, 2), dtype=torch.float32, device=qkv.device)
        _rest_kernel[(self.tiles, heads, self.shares)](
            qkv,
            keys,
            out,
            sums,
            scales,
            self.arrived,
            self.start,
            rows,
            dim**-0.5 * math.log2(math.e),
            HEADS=heads,
            DIM=dim,
            TILE=TILE,
            KEYS=KEYS,
            num_warps=4,
            num_stages=3,
        )
