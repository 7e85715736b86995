"""The tower's blocks on a GPU with few, large launches: eight or nine per block, not about thirty.

What surrounds matrix products and attention is bound by memory and launches, so it is fused by
hand: residual sum with the norm that follows it, rotary embedding of q and k in place, SwiGLU.
Nothing is specialised for a number of rows: the kernels compile once, in the profile run at
start-up, and no request waits for a compiler. What launching them still costs a single image,
graphs.py saves.

Every intermediate is rounded where tower.py rounds it, so both compute the same function; only gate
and up stay wide where their product applies SwiGLU itself, and what an MLP adds to the rows until
it is added.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from vision_exp.tower.attention import Attend
from vision_exp.tower.backends import Backend


def supports(tower: Any) -> bool:
    """Whether the fused blocks can run this tower."""
    dtype, dim = tower.patch_embed.proj.weight.dtype, tower.config.dim
    return dtype == torch.bfloat16 and dim.bit_count() == 1


def run_blocks(
    tower: Any,
    x: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    attend: Attend,
    backend: Backend,
) -> torch.Tensor:
    """All blocks and the final norm over packed rows ``x`` (n, dim), which are overwritten.

    ``rope``: cos and sin, float32 (n, head_dim / 2) each. Sharded layers work as in tower.py:
    widths are read off what the layers return.
    """
    blocks, gated_linear, pdl = list(tower.blocks), backend.gated_linear, backend.pdl
    next_norms = [block.norm1 for block in blocks[1:]] + [tower.norm]
    normed = add_norm(x, None, blocks[0].norm1, pdl)
    for block, next_norm in zip(blocks, next_norms, strict=True):
        qkv = block.attn.wqkv(normed).unflatten(-1, (3, block.attn.n_heads, -1))
        apply_rotary_(qkv, *rope, pdl)
        normed = add_norm(x, block.attn.wo(attend(qkv)), block.norm2, pdl)
        w1, w2 = block.mlp.w1, block.mlp.w2
        hidden = gated_linear(normed, w1.weight) if gated_linear else swiglu(w1(normed))
        if block.sharded:
            normed = add_norm(x, w2(hidden), next_norm, pdl)
        else:
            # With no sum over ranks between, the product itself adds to the rows: 43 to 80
            # microseconds less for the tower at 3,312 rows (H200).
            normed = add_norm(x.addmm_(hidden, w2.weight.t()), None, next_norm, pdl)
    return normed


def aligned(values: int) -> int:
    """``values`` rounded up to BF16 rows of whole 16 bytes, for which cuBLAS has faster kernels.

    3,327 patches of 588 values take 40 microseconds, of 592 values 14 (H200).
    """
    return triton.cdiv(values, 8) * 8


def embed(patches: torch.Tensor, proj: Any) -> torch.Tensor:
    """Rows (n, dim) of flat patches (n, k) by the layer ``proj``, which has at most k inputs.

    What lies behind a patch's own values weighs nothing.
    """
    # Each time: a kept copy would not follow weights that are loaded again.
    weight = F.pad(proj.weight, (0, patches.shape[1] - proj.weight.shape[1]))
    return F.linear(patches.to(weight.dtype), weight, proj.bias)


@triton.jit
def _wait_for_inputs(PDL: tl.constexpr):
    """With programmatic dependent launch a kernel starts while the one before it ends: what that
    one writes may be read only after this. See
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#programmatic-dependent-launch-and-synchronization
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


# Widths are constants of the model, so that rows are known to be aligned and load 16 bytes at once.
@triton.jit
def _add_norm_kernel(
    x_ptr,
    other_ptr,
    weight_ptr,
    out_ptr,
    eps,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * WIDTH
    columns = tl.arange(0, WIDTH)
    weight = tl.load(weight_ptr + columns).to(tl.float32)
    _wait_for_inputs(PDL)
    x = tl.load(x_ptr + row + columns).to(tl.float32)
    if ADD:
        x += tl.load(other_ptr + row + columns).to(tl.float32)
        rounded = x.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row + columns, rounded)
        x = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    tl.store(out_ptr + row + columns, (weight * (x * scale)).to(out_ptr.dtype.element_ty))


def add_norm(x: torch.Tensor, other: torch.Tensor | None, norm: Any, pdl: bool) -> torch.Tensor:
    """RMSNorm of ``x + other`` as by tower.RMSNorm ``norm``; the sum is left in ``x``.

    Rows (n, dim), dim a power of two.
    """
    out = torch.empty_like(x)
    rows, width = x.shape
    _add_norm_kernel[(rows,)](
        x,
        x if other is None else other,
        norm.weight,
        out,
        norm.eps,
        WIDTH=width,
        ADD=other is not None,
        num_warps=4,
        **_launch_options(pdl),
    )
    return out


@triton.jit
def _apply_rotary_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, SIZE)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    # q and k lie one after the other: 2 * HEADS heads of 2 * HALF values.
    inside = (head < 2 * HEADS) & (pair >= 0)
    first_ptr = qkv_ptr + row * STRIDE + head * (2 * HALF) + pair
    _wait_for_inputs(PDL)
    cos = tl.load(cos_ptr + row * HALF + pair)
    sin = tl.load(sin_ptr + row * HALF + pair)
    first = tl.load(first_ptr, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(first_ptr + HALF, mask=inside, other=0.0).to(tl.float32)
    kind = qkv_ptr.dtype.element_ty
    tl.store(first_ptr, (first * cos - second * sin).to(kind), mask=inside)
    tl.store(first_ptr + HALF, (second * cos + first * sin).to(kind), mask=inside)


def apply_rotary_(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pdl: bool) -> None:
    """Rotary embedding of q and k of (n, 3, heads, head_dim) in place, as by tower.apply_rotary."""
    rows, _, heads, dim = qkv.shape
    _apply_rotary_kernel[(rows,)](
        qkv,
        cos,
        sin,
        STRIDE=qkv.stride(0),
        HEADS=heads,
        HALF=dim // 2,
        SIZE=triton.next_power_of_2(2 * heads),
        num_warps=4,
        **_launch_options(pdl),
    )


def _launch_options(pdl: bool) -> dict[str, bool]:
    # Triton for other GPUs may not know `launch_pdl`.
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


@triton.jit
def _swiglu_kernel(x_ptr, out_ptr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = columns < WIDTH
    gate = tl.load(x_ptr + row * 2 * WIDTH + columns, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * 2 * WIDTH + WIDTH + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    value = (wide / (1.0 + tl.exp(-wide)) * up.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + columns, value, mask=inside)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of rows that hold gate, then up: (n, 2 m) to (n, m)."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty((rows, width))
    _swiglu_kernel[(rows, triton.cdiv(width, 1024))](x, out, WIDTH=width, SIZE=1024, num_warps=4)
    return out


@triton.jit
def _expand_rope_table_kernel(
    axis_ptr, width_ptr, out_ptr, rows, positions, SIZE: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    inside = (row < rows) & (column >= 0)
    width = tl.load(width_ptr)
    # Rows behind the image's last lie below the table; nobody reads what they get.
    down = tl.minimum(row // width, positions - 1)
    out = out_ptr + row * 2 * SIZE + column
    tl.store(out, tl.load(axis_ptr + down * SIZE + column, mask=inside), mask=inside)
    right = row % width
    tl.store(out + SIZE, tl.load(axis_ptr + right * SIZE + column, mask=inside), mask=inside)


def expand_rope_table(axis: torch.Tensor, width: torch.Tensor, rows: int) -> torch.Tensor:
    """Axis table (positions, k) to (rows, 2 k) for patches of one image, row by row.

    A patch's row entry, then its column entry. ``width``: columns of the grid, int32 (1,), read on
    the device. k is a power of two.
    """
    positions, size = axis.shape
    out = axis.new_empty((rows, 2 * size))
    grid = (triton.cdiv(rows, 32),)
    _expand_rope_table_kernel[grid](axis, width, out, rows, positions, SIZE=size, ROWS=32)
    return out
