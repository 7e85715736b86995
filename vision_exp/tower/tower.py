"""The vision tower and the aligner: patches to rows of the language model.

A pre-norm ViT with full attention inside one image and none between images, and a two-layer
projector over cells of ``downsample_ratio`` x ``downsample_ratio`` patches. Parameter names are
the checkpoint's (``vision.`` and ``aligner.`` before them).

Precision: linear layers and attention in the parameters' dtype (bfloat16), norms and rotary
embedding in float32. Norm weights are float32 parameters: exact whichever way a checkpoint stores
them.

Several images go in one call, packed row after row with one grid each. Grids are Python ints:
nothing in a forward pass depends on data or waits for the device, so a pass of fixed grids can be
compiled or captured. Neighbours of equal size share one batched attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import nn

from vision_exp.config import VisionConfig
from vision_exp.tower.attention import Flash
from vision_exp.tower.linears import PLAIN, Linears

Grid = tuple[int, int]
#: One image's grid (h, w), or one grid for each packed image.
Grids = Grid | Sequence[Grid]
#: cos and sin of packed rows: float32 (n, head_dim / 2) each.
Rope = tuple[torch.Tensor, torch.Tensor]
T = TypeVar("T")


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, in float32, back to the input's dtype.

    https://arxiv.org/abs/1910.07467
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * (wide * scale)).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Axial 2D RoPE (https://arxiv.org/abs/2403.13298): ``rope(grids, device)`` to cos and sin.

    The first half of a head's pairs turns by the patch's row, the second half by its column.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.half, self.theta = config.head_dim // 2, config.rope_theta
        # No side is longer than a column or row of the whole budget.
        self.positions = config.max_n_token * config.downsample_ratio
        self._axes: dict[torch.device, Rope] = {}

    def forward(self, grids: Sequence[Grid], device: torch.device) -> Rope:
        """Tables of packed images, put together on the device from one table per axis."""
        cos, sin = (expand_rope_table(axis, grids) for axis in self.axis_tables(device))
        return cos, sin

    def axis_tables(self, device: torch.device) -> Rope:
        """cos and sin of every position along an axis: float32 (positions, head_dim / 4).

        No buffers, because a module's ``.to(bfloat16)`` would round those; computed on the CPU, so
        that every device has the same angles, and copied to each device once.
        """
        if device not in self._axes:
            steps = torch.arange(0, self.half, 2, dtype=torch.float32, device="cpu") / self.half
            positions = torch.arange(self.positions, dtype=torch.float32, device="cpu")
            angles = positions[:, None] * (1.0 / self.theta**steps)
            self._axes[device] = angles.cos().to(device), angles.sin().to(device)
        return self._axes[device]


def expand_rope_table(axis: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
    """Axis table (positions, k) to rows (n, 2 k): a patch's row entry, then its column entry."""
    images = [
        torch.cat(
            (
                axis[:height, None].expand(-1, width, -1),
                axis[None, :width].expand(height, -1, -1),
            ),
            dim=-1,
        ).flatten(0, 1)
        for height, width in grids
    ]
    return torch.cat(images)


def apply_rotary(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """(heads, n, head_dim) rotated, in the dtype of ``x``; pair i is (i, i + head_dim / 2).

    https://arxiv.org/abs/2104.09864
    """
    cos, sin = rope
    first, second = x.float().chunk(2, dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(rotated, dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: VisionConfig, linears: Linears, prefix: str) -> None:
        super().__init__()
        if config.n_heads % linears.tp_size:
            raise ValueError(f"{config.n_heads} heads cannot be shared by {linears.tp_size} ranks")
        self.n_heads = config.n_heads // linears.tp_size
        dim, head_dim = config.dim, config.head_dim
        self.wqkv = linears.qkv(dim, head_dim, config.n_heads, prefix=f"{prefix}.wqkv")
        self.wo = linears.row(dim, dim, bias=True, prefix=f"{prefix}.wo")

    def forward(self, x: torch.Tensor, rope: Rope, seqlens: Sequence[int]) -> torch.Tensor:
        """x: (n, dim), images of ``seqlens`` rows packed one after the other."""
        qkv = self.wqkv(x).unflatten(-1, (3, self.n_heads, -1))
        q, k, v = qkv.permute(1, 2, 0, 3).unbind()  # (heads, n, d)
        # Head by head in memory: torch's attention on a CPU is a tenth faster so.
        packed = (apply_rotary(q, rope), apply_rotary(k, rope), v.contiguous())
        parts = []
        runs = run_lengths(seqlens)
        sizes = [seqlen * count for seqlen, count in runs]
        for (seqlen, count), *qkv in zip(
            runs, *(t.split(sizes, dim=1) for t in packed), strict=True
        ):
            # each (images, heads, seqlen, d)
            q, k, v = (t.unflatten(1, (count, seqlen)).transpose(0, 1) for t in qkv)
            out = F.scaled_dot_product_attention(q, k, v)
            parts.append(out.transpose(1, 2).flatten(2).flatten(0, 1))  # (rows, heads * d)
        return self.wo(parts[0] if len(parts) == 1 else torch.cat(parts))


class MLP(nn.Module):
    """SwiGLU (https://arxiv.org/abs/2002.05202); ``w1`` holds the gate rows, then the up rows."""

    def __init__(self, config: VisionConfig, linears: Linears, prefix: str) -> None:
        super().__init__()
        self.w1 = linears.gate_up(config.dim, config.inter_dim, prefix=f"{prefix}.w1")
        self.w2 = linears.row(config.inter_dim, config.dim, bias=False, prefix=f"{prefix}.w2")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.w1(x).chunk(2, dim=-1)
        # Rounded once, after the product, as a fused kernel does.
        wide = gate.to(torch.float32, copy=True)
        return self.w2(F.silu(wide, inplace=True).mul_(up).to(x.dtype))


class Block(nn.Module):
    def __init__(self, config: VisionConfig, linears: Linears, prefix: str) -> None:
        super().__init__()
        #: Whether its layers are summed over tensor-parallel ranks.
        self.sharded = linears.tp_size > 1
        self.norm1 = RMSNorm(config.dim)
        self.attn = Attention(config, linears, f"{prefix}.attn")
        self.norm2 = RMSNorm(config.dim)
        self.mlp = MLP(config, linears, f"{prefix}.mlp")

    def forward(self, x: torch.Tensor, rope: Rope, seqlens: Sequence[int]) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), rope, seqlens)
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    def __init__(self, config: VisionConfig, linears: Linears, prefix: str) -> None:
        super().__init__()
        self.proj = linears.replicated(
            3 * config.patch_size**2, config.dim, bias=True, prefix=f"{prefix}.proj"
        )

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return self.proj(patches.flatten(1).to(next(self.proj.parameters()).dtype))


class VisionTower(nn.Module):
    """``tower(patches, vit_grid)``: (n, 3, p, p) to (n, dim).

    ``vit_grid`` is one image's (h, w), or a sequence of them for packed images; n is the sum of
    their areas (ValueError otherwise). ``flash``: vLLM's FlashAttention, as whoever builds the
    tower in vLLM's config context was told; None asks when the tower first runs.
    """

    flash: Flash | None = None

    def __init__(
        self, config: VisionConfig, linears: Linears = PLAIN, prefix: str = "vision"
    ) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config, linears, f"{prefix}.patch_embed")
        self.rope = RotaryEmbedding(config)
        self.blocks = nn.ModuleList(
            Block(config, linears, f"{prefix}.blocks.{index}") for index in range(config.n_layers)
        )
        self.norm = RMSNorm(config.dim)

    def forward(self, patches: torch.Tensor, vit_grid: Grids) -> torch.Tensor:
        if patches.is_cuda:
            from vision_exp.tower import fused, graphs, rocm  # Triton, which a CPU does without

            if fused.supports(self) and rocm.fused_runs(self, patches):  # the same in few launches
                return graphs.run(self, patches, *packed_images(patches, vit_grid))
        return self.forward_plain(patches, vit_grid)

    def forward_plain(self, patches: torch.Tensor, vit_grid: Grids) -> torch.Tensor:
        """Module by module, on any device."""
        grids, seqlens = packed_images(patches, vit_grid)
        x = self.patch_embed(patches)
        rope = self.rope(grids, patches.device)
        for block in self.blocks:
            x = block(x, rope, seqlens)
        return self.norm(x)


class Aligner(nn.Module):
    """``aligner(rows, vit_grid)``: (n_vit, dim) to (n_llm, hidden), cells in raster order.

    ``vit_grid`` as for VisionTower. A grid is completed with zeros on the right and at the bottom
    to multiples of the downsample ratio. A cell's values lie channel by channel, each by row and
    column inside the cell, as torch's pixel_unshuffle orders them.
    """

    def __init__(
        self, config: VisionConfig, linears: Linears = PLAIN, prefix: str = "aligner"
    ) -> None:
        super().__init__()
        self.ratio = config.downsample_ratio
        n_in, hidden = config.dim * self.ratio**2, config.hidden_size
        self.w1 = linears.column(n_in, hidden, bias=True, prefix=f"{prefix}.w1")
        self.w2 = linears.row(hidden, hidden, bias=True, prefix=f"{prefix}.w2")

    def forward(self, rows: torch.Tensor, vit_grid: Grids) -> torch.Tensor:
        grids, _ = packed_images(rows, vit_grid)
        runs = run_lengths(grids)
        pieces = rows.split([height * width * count for (height, width), count in runs])
        parts = [
            self._cells(piece.view(count, *grid, -1))
            for (grid, count), piece in zip(runs, pieces, strict=True)
        ]
        cells = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.w2(F.gelu(self.w1(cells)))

    def _cells(self, x: torch.Tensor) -> torch.Tensor:
        """(images, h, w, dim) to (images * cells, dim * ratio * ratio)."""
        ratio = self.ratio
        x = F.pad(x, (0, 0, 0, -x.shape[2] % ratio, 0, -x.shape[1] % ratio))
        x = x.unflatten(2, (-1, ratio)).unflatten(1, (-1, ratio))  # (images, h, r, w, r, dim)
        return x.permute(0, 1, 3, 5, 2, 4).flatten(3).flatten(0, 2)


def packed_images(rows: torch.Tensor, vit_grid: Grids) -> tuple[list[Grid], list[int]]:
    """Grid and number of rows of each image. ValueError if ``rows`` are not as many as these."""
    given = [vit_grid] if isinstance(vit_grid[0], int) else vit_grid
    grids = [(height, width) for height, width in cast("Sequence[Grid]", given)]
    seqlens = [height * width for height, width in grids]
    if sum(seqlens) != len(rows):
        raise ValueError(f"grids {grids} have {sum(seqlens)} patches, got {len(rows)}")
    return grids, seqlens


def run_lengths(items: Iterable[T]) -> list[tuple[T, int]]:
    """Equal neighbours with their number: [5, 5, 3] to [(5, 2), (3, 1)]."""
    return [(item, len(list(group))) for item, group in groupby(items)]
