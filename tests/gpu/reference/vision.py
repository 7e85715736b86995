"""Tower, aligner and merge in float32, written from the model's description with plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import torch
from gpu.reference import weights as reference_weights
from gpu.reference.image import (
    END,
    IMAGE,
    KINDS,
    NEWLINE,
    PAD,
    PLACEHOLDER_ID,
    SENTINEL_FIRST,
    START,
    block_of,
)
from gpu.reference.lm import Prompt
from torch.nn import functional as F

_LEARNED = {
    START: "image_start",
    PAD: "image_pad",
    NEWLINE: "image_newline",
    END: "image_end",
}
#: The tower's own epsilon; the language model's rms_norm_eps does not reach it.
_EPS = 1e-6


class ReferenceVision:
    """Float32 vision part of a checkpoint folder, and its token embeddings."""

    def __init__(self, folder: Path, config: dict, *, device: str = "cpu") -> None:
        self.config = config
        self.weights = reference_weights.load(folder, _is_vision, device)
        self.embed = self.weights.pop("embed.weight")

    @torch.inference_mode()
    def rows(self, patches: torch.Tensor, vit_grid: tuple[int, int]) -> torch.Tensor:
        """Aligner output (llm_h * llm_w, hidden) in raster order of the LLM grid."""
        return self.aligned(self.features(patches, vit_grid))

    def aligned(self, features: torch.Tensor) -> torch.Tensor:
        return self._linear("aligner.w2", features)

    @torch.inference_mode()
    def features(self, patches: torch.Tensor, vit_grid: tuple[int, int]) -> torch.Tensor:
        """What the aligner's last matrix is given (llm_h * llm_w, hidden), in raster order."""
        weights, config = self.weights, self.config
        heads = config["vision_n_heads"]
        values = patches.to(self.embed.device).float().flatten(1)
        x = self._linear("vision.patch_embed.proj", values)
        rope = _rotation(vit_grid, config["vision_rope_theta"], x.shape[1] // heads, x.device)
        for index in range(config["vision_n_layers"]):
            block = f"vision.blocks.{index}."
            normed = _rms(x, weights[f"{block}norm1.weight"])
            qkv = self._linear(f"{block}attn.wqkv", normed).view(len(x), 3, heads, -1)
            q, k, v = (_apply_rotary(qkv[:, 0], rope), _apply_rotary(qkv[:, 1], rope), qkv[:, 2])
            scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
            mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
            x = x + self._linear(f"{block}attn.wo", mixed)
            normed = _rms(x, weights[f"{block}norm2.weight"])
            gate, up = self._linear(f"{block}mlp.w1", normed).chunk(2, dim=-1)
            x = x + self._linear(f"{block}mlp.w2", F.silu(gate) * up)
        x = _rms(x, weights["vision.norm.weight"])
        merged = _merge(x, vit_grid, config["vision_downsample_ratio"])
        return F.gelu(self._linear("aligner.w1", merged))

    def prompt(self, ids: list[int], images: list) -> Prompt:
        """Expands each placeholder id in ``ids`` by the next of ``images`` (patches and grids)."""
        rows = [(self.rows(image.patches, image.vit_grid), image.llm_grid) for image in images]
        return self.expanded(ids, rows)

    def expanded(
        self,
        ids: list[int],
        images: list[tuple[torch.Tensor, tuple[int, int]]],
        *,
        permuted: bool = True,
        swapped: bool = False,
    ) -> Prompt:
        """`prompt` from aligned rows and their grids. The switches do what is wrong, as controls.

        ``permuted`` False puts cells in raster order; ``swapped`` gives START and END the vector
        of PAD, and PAD that of START.
        """
        learned = dict(_LEARNED)
        if swapped:
            learned |= {START: "image_pad", END: "image_pad", PAD: "image_start"}
        tokens: list[int] = []
        rows: list[torch.Tensor] = []
        spans: list[tuple[int, int]] = []
        queue = list(images)
        for token in ids:
            if token != PLACEHOLDER_ID:
                tokens.append(token)
                rows.append(self.embed[token][None])
                continue
            cells, grid = queue.pop(0)
            start = len(tokens)
            types, shown = block_of(grid, start)
            kinds = torch.tensor(types, device=self.embed.device)
            values = torch.empty(len(types), self.embed.shape[1], device=self.embed.device)
            for kind, name in learned.items():
                values[kinds == kind] = self.weights[name]
            values[kinds == IMAGE] = cells[shown] if permuted else cells
            tokens += [SENTINEL_FIRST + kind for kind in types]
            rows.append(values)
            spans.append((start + 3 - start % 4, len(tokens) - 1))
        if queue:
            raise ValueError(f"{len(queue)} images more than placeholders")
        ids_tensor = torch.tensor(tokens)
        image_rows = (ids_tensor >= SENTINEL_FIRST) & (ids_tensor < SENTINEL_FIRST + len(KINDS))
        return Prompt(ids_tensor, torch.cat(rows), image_rows, spans)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))


def _is_vision(name: str) -> bool:
    return name.startswith(("vision.", "aligner.", "image_")) or name == "embed.weight"


def _rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _EPS) * weight


def _rotation(grid: tuple[int, int], theta: float, dim: int, device: torch.device) -> torch.Tensor:
    """(patches, dim / 2) angles: the first half of the pairs by row, the second by column."""
    pairs = dim // 4
    inverse = theta ** (-2 * torch.arange(pairs, device=device).float() / (2 * pairs))
    row, column = torch.meshgrid(*(torch.arange(side) for side in grid), indexing="ij")
    parts = [side.flatten().to(device).float()[:, None] * inverse for side in (row, column)]
    return torch.cat(parts, dim=1)


def _apply_rotary(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (i, i + dim / 2) of (patches, heads, dim)."""
    left, right = x.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def _merge(x: torch.Tensor, grid: tuple[int, int], ratio: int) -> torch.Tensor:
    """(cells, dim * ratio^2): ratio x ratio cells, channel-major, zero-padded right and below."""
    height, width = grid
    padded = x.view(height, width, -1).permute(2, 0, 1)
    padded = F.pad(padded, (0, -width % ratio, 0, -height % ratio))
    return F.unfold(padded[None], kernel_size=ratio, stride=ratio)[0].T
