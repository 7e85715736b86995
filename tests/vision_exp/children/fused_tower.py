"""Runs the fused blocks in Triton's interpreter on the CPU against tower.py; prints JSON.

In float32: the interpreter cuts bfloat16 off instead of rounding it.
"""

from __future__ import annotations

import json

import torch

from vision_exp import tower_fused, tower_graphs
from vision_exp.config import VisionConfig
from vision_exp.tower import VisionTower

GRIDS = [(3, 5), (3, 5), (7, 2)]


def by_edges(qkv: torch.Tensor, edges: torch.Tensor, longest: int) -> torch.Tensor:
    """Attention that takes the lengths from a tensor, as FlashAttention does."""
    lengths = edges.diff().tolist()
    assert max(lengths) <= longest
    return tower_fused.torch_attention(qkv, lengths)


def bucket_error(tower: VisionTower, grid: tuple[int, int]) -> float:
    """One picture in a bucket that is too large, its work repeated instead of captured.

    Three times: rows left over by a run must not reach the next one.
    """
    count = grid[0] * grid[1]
    patches = torch.randn(count, 3, 14, 14)
    taps: dict[str, torch.Tensor] = {}
    expected = tower(patches, grid, taps)
    turn = tower.turn([grid], patches.device)
    rows = taps["patch_embed"]
    bucket = tower_graphs.Bucket(tower, count + 9, rows, by_edges, lambda work: work)
    left = []
    for _ in range(3):
        found = bucket.run(rows, turn.cos, turn.sin)
        left.append(bucket.x[count:].clone())
    assert found.shape == expected.shape
    assert torch.equal(left[0], left[2])
    return float((found - expected).norm() / expected.norm())


def main() -> None:
    torch.manual_seed(0)
    config = VisionConfig(
        n_layers=2,
        dim=128,
        n_heads=2,
        inter_dim=192,
        patch_size=14,
        rope_theta=10000.0,
        downsample_ratio=3,
        max_n_token=384,
        min_pixels=147456,
        max_wh_ratio=8,
        hidden_size=128,
    )
    tower = VisionTower(config)
    for parameter in tower.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    count = sum(height * width for height, width in GRIDS)
    patches = torch.randn(count, 3, 14, 14)
    with torch.inference_mode():
        taps: dict[str, torch.Tensor] = {}
        expected = tower(patches, GRIDS, taps)
        turn = tower.turn(GRIDS, patches.device)
        found = tower_fused.run_blocks(
            tower.blocks,
            tower.norm,
            taps["patch_embed"].clone(),
            turn.cos,
            turn.sin,
            [height * width for height, width in GRIDS],
            tower_fused.torch_attention,
        )
        gate_up = torch.randn(9, 6)
        gate, up = gate_up.chunk(2, dim=-1)
        swiglu = tower_fused.swiglu(gate_up) - torch.nn.functional.silu(gate) * up
        in_buckets = max(bucket_error(tower, grid) for grid in (GRIDS[0], GRIDS[2]))
    error = (found - expected).norm() / expected.norm()
    print(
        json.dumps(
            {"error": float(error), "swiglu": float(swiglu.abs().max()), "buckets": in_buckets}
        )
    )


if __name__ == "__main__":
    main()
