"""Runs the fused blocks in Triton's interpreter on the CPU against tower.py; prints JSON.

In float32: the interpreter cuts bfloat16 off instead of rounding it.
"""

from __future__ import annotations

import json

import torch

from vision_exp import tower_fused
from vision_exp.config import VisionConfig
from vision_exp.tower import VisionTower

GRIDS = [(3, 5), (3, 5), (7, 2)]


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
    error = (found - expected).norm() / expected.norm()
    print(json.dumps({"error": float(error), "swiglu": float(swiglu.abs().max())}))


if __name__ == "__main__":
    main()
