"""The vision tower and the aligner: patches to rows of the language model.

A pre-norm ViT with full attention inside one picture and none between pictures, and a two-layer
projector over cells of ``downsample_ratio`` x ``downsample_ratio`` patches. Parameter names are
the checkpoint's (``vision.`` and ``aligner.`` before them).

Precision: linear layers and attention in the parameters' dtype (bfloat16), norms and the rotary
turn in float32. Norm weights are float32 parameters: exact whichever way a checkpoint stores them.

Several pictures go in one call, packed row after row with one grid each. Grids are Python ints:
nothing in a forward pass depends on data or waits for the device, so a pass of fixed grids can be
compiled or captured. Neighbours of equal size share one batched attention.

The same modules run on plain torch and under vLLM's tensor parallelism: `Linears` makes the
layers (see linears.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import nn

from vision_exp.config import VisionConfig
from vision_exp.tower.linears import PLAIN, Linears

Grid = tuple[int, int]
#: One picture's grid (h, w), or one grid for each packed picture.
Grids = Grid | Sequence[Grid]
Taps = dict[str, torch.Tensor]
T = TypeVar("T")

NORM_EPS = 1e-6


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, in float32, back to the input's dtype."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS)
        return (self.weight.float() * (wide * scale)).to(x.dtype)


@dataclass(frozen=True)
class Turn:
    """Rotary tables of packed rows: float32 (n, head_dim / 2), pair i is (i, i + head_dim / 2).

    The first half of the pairs turns by the patch's row, the second half by its column.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(heads, n, head_dim) turned, in the dtype of ``x``."""
        first, second = x.float().chunk(2, dim=-1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(turned, dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: VisionConfig, linears: Linears, prefix: str) -> None:
        super().__init__()
        if config.n_heads % linears.tp_size:
            raise ValueError(f"{config.n_heads} heads cannot be shared by {linears.tp_size} ranks")
        self.n_heads = config.n_heads // linears.tp_size
        dim, head_dim = config.dim, config.head_dim
        self.wqkv = linears.qkv(dim, head_dim, config.n_heads, prefix=f"{prefix}.wqkv")
        self.wo = linears.row(dim, dim, bias=True, prefix=f"{prefix}.wo")

    def forward(self, x: torch.Tensor, turn: Turn, lengths: Sequence[int]) -> torch.Tensor:
        """x: (n, dim), pictures of ``lengths`` rows packed one after the other."""
        qkv = self.wqkv(x).unflatten(-1, (3, self.n_heads, -1))
        q, k, v = qkv.permute(1, 2, 0, 3).unbind()  # (heads, n, d)
        # Head by head in memory: torch's attention on a CPU is a tenth faster so.
        packed = (turn(q), turn(k), v.contiguous())
        parts = []
        start = 0
        for length, count in _runs(lengths):
            stop = start + length * count
            q, k, v = (
                t[:, start:stop].unflatten(1, (count, length)).transpose(0, 1) for t in packed
            )  # (images, heads, length, d)
            out = F.scaled_dot_product_attention(q, k, v)
            parts.append(out.transpose(1, 2).flatten(2).flatten(0, 1))  # (rows, heads * d)
            start = stop
        return self.wo(parts[0] if len(parts) == 1 else torch.cat(parts))


class MLP(nn.Module):
    """SwiGLU; ``w1`` holds the gate rows, then the up rows."""

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

    def forward(self, x: torch.Tensor, turn: Turn, lengths: Sequence[int]) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), turn, lengths)
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

    ``vit_grid`` is one picture's (h, w), or a sequence of them for packed pictures; n is the sum of
    their areas (ValueError otherwise). With ``taps``, a dict, the output of every stage is put
    there under its module's name, for comparisons layer by layer.
    """

    def __init__(
        self, config: VisionConfig, linears: Linears = PLAIN, prefix: str = "vision"
    ) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config, linears, f"{prefix}.patch_embed")
        self.blocks = nn.ModuleList(
            Block(config, linears, f"{prefix}.blocks.{index}") for index in range(config.n_layers)
        )
        self.norm = RMSNorm(config.dim)
        self._axes: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(
        self, patches: torch.Tensor, vit_grid: Grids, taps: Taps | None = None
    ) -> torch.Tensor:
        grids = _grids(vit_grid)
        lengths = _check_rows(patches, grids)
        on_gpu = taps is None and patches.is_cuda
        if on_gpu:
            from vision_exp.tower import fused, graphs

            rows = graphs.run(self, patches, grids)
            if rows is not None:
                return rows
        x = _tap(taps, "patch_embed", self.patch_embed(patches))
        turn = self.turn(grids, patches.device)
        if on_gpu and fused.usable(x):
            return fused.run_blocks(list(self.blocks), self.norm, x, turn.cos, turn.sin, lengths)
        for index, block in enumerate(self.blocks):
            x = _tap(taps, f"blocks.{index}", block(x, turn, lengths))
        return _tap(taps, "norm", self.norm(x))

    def turn(self, grids: Sequence[Grid], device: torch.device) -> Turn:
        """Rotary tables of packed pictures, put together on the device from one table per axis."""
        return Turn(*(_spread(axis, grids) for axis in self.axis_tables(device)))

    def axis_tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of every position along an axis: float32 (positions, head_dim / 4).

        No buffers, because a module's ``.to(bfloat16)`` would round those; computed on the CPU, so
        that every device turns by the same angles, and copied to each device once.
        """
        if device not in self._axes:
            config = self.config
            half = config.head_dim // 2
            steps = torch.arange(0, half, 2, dtype=torch.float32, device="cpu") / half
            # No side is longer than a column or row of the whole budget.
            side = config.max_n_token * config.downsample_ratio
            positions = torch.arange(side, dtype=torch.float32, device="cpu")
            angles = positions[:, None] * (1.0 / config.rope_theta**steps)
            self._axes[device] = angles.cos().to(device), angles.sin().to(device)
        return self._axes[device]


class Aligner(nn.Module):
    """``aligner(rows, vit_grid)``: (n_vit, dim) to (n_llm, hidden), cells in raster order.

    ``vit_grid`` as for VisionTower. A grid is completed with zeros on the right and at the bottom
    to multiples of the downsample ratio. A cell's values lie channel by channel, each by row and
    column inside the cell.
    """

    def __init__(
        self, config: VisionConfig, linears: Linears = PLAIN, prefix: str = "aligner"
    ) -> None:
        super().__init__()
        self.ratio = config.downsample_ratio
        n_in, hidden = config.dim * self.ratio**2, config.hidden_size
        self.w1 = linears.column(n_in, hidden, bias=True, prefix=f"{prefix}.w1")
        self.w2 = linears.row(hidden, hidden, bias=True, prefix=f"{prefix}.w2")

    def forward(
        self, rows: torch.Tensor, vit_grid: Grids, taps: Taps | None = None
    ) -> torch.Tensor:
        grids = _grids(vit_grid)
        _check_rows(rows, grids)
        parts = []
        start = 0
        for (height, width), count in _runs(grids):
            stop = start + height * width * count
            parts.append(self._cells(rows[start:stop].view(count, height, width, -1)))
            start = stop
        cells = _tap(taps, "cells", parts[0] if len(parts) == 1 else torch.cat(parts))
        return _tap(taps, "w2", self.w2(F.gelu(_tap(taps, "w1", self.w1(cells)))))

    def _cells(self, x: torch.Tensor) -> torch.Tensor:
        """(images, h, w, dim) to (images * cells, dim * ratio * ratio)."""
        ratio = self.ratio
        x = F.pad(x, (0, 0, 0, -x.shape[2] % ratio, 0, -x.shape[1] % ratio))
        x = x.unflatten(2, (-1, ratio)).unflatten(1, (-1, ratio))  # (images, h, r, w, r, dim)
        return x.permute(0, 1, 3, 5, 2, 4).flatten(3).flatten(0, 2)


def _grids(vit_grid: Grids) -> list[Grid]:
    """A list of grids from one grid or several; (h, w) may be a tuple or a list."""
    grids = [vit_grid] if isinstance(vit_grid[0], int) else vit_grid
    return [(height, width) for height, width in cast("Sequence[Grid]", grids)]


def _check_rows(rows: torch.Tensor, grids: Sequence[Grid]) -> list[int]:
    """Rows of each picture. Raises ValueError if they do not add up to the tensor's."""
    lengths = [height * width for height, width in grids]
    if sum(lengths) != len(rows):
        raise ValueError(f"grids {grids} have {sum(lengths)} patches, got {len(rows)}")
    return lengths


def _runs(items: Iterable[T]) -> list[tuple[T, int]]:
    """Equal neighbours with their number: [5, 5, 3] to [(5, 2), (3, 1)]."""
    return [(item, len(list(group))) for item, group in groupby(items)]


def _spread(axis: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
    """Axis table (positions, k) to rows (n, 2 k): a patch's row entry, then its column entry."""
    pictures = [
        torch.cat(
            (
                axis[:height, None].expand(-1, width, -1),
                axis[None, :width].expand(height, -1, -1),
            ),
            dim=-1,
        ).flatten(0, 1)
        for height, width in grids
    ]
    return torch.cat(pictures)


def _tap(taps: Taps | None, name: str, value: torch.Tensor) -> torch.Tensor:
    if taps is not None:
        taps[name] = value
    return value
