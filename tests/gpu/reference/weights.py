"""Reads a checkpoint in the released layout into float32: the exact values its codes mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

#: The sixteen values of e2m1, by code; the lower nibble of a byte is the earlier element.
_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_E2M1 = [*_E2M1, *[-value for value in _E2M1]]


def load(folder: Path, keep: Callable[[str], bool], device: str = "cpu") -> dict[str, torch.Tensor]:
    """Float32 tensors by checkpoint name, scales already applied; integer tables stay integers."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    wanted: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        if keep(name):
            wanted.setdefault(shard, []).append(name)
    raw: dict[str, torch.Tensor] = {}
    for shard, names in wanted.items():
        with safe_open(folder / shard, framework="pt", device=device) as file:
            raw |= {name: file.get_tensor(name) for name in names}
    values = {}
    for name, value in raw.items():
        if name.endswith(".scale"):
            continue
        scale = raw.get(name.removesuffix("weight") + "scale")
        values[name] = _dequantise(value, scale)
    return values


def _dequantise(value: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    if scale is None:
        return value.float() if value.is_floating_point() else value
    if value.dtype == torch.int8:
        codes = value.view(torch.uint8).long()
        table = torch.tensor(_E2M1, device=value.device)
        value = torch.stack((table[codes & 15], table[codes >> 4]), dim=-1).flatten(1)
        return value * scale.float().repeat_interleave(32, dim=1)
    rows, cols = value.shape
    spread = scale.float().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
    return value.float() * spread
