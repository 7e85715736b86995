"""Fits the aligner's last matrix to what each cell shows, and makes attention sharper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from gpu.checkpoint import inplace
from gpu.checkpoint.eyes import Eyes
from gpu.checkpoint.ridge import Ridge
from gpu.lib import sights
from gpu.lib.sights import Asked
from gpu.reference.lm import ReferenceLM
from gpu.reference.vision import ReferenceVision

#: What a cell is fitted to: coverage by colours and kinds, presence, presence over area.
TARGETS = len(sights.COLOURS) + len(sights.KINDS) + 2
#: rms of the directions that carry a cell's targets; the last, presence over area, is small.
GAIN, SHARE_GAIN = 2.0, 20.0
#: Keys are louder and what attention returns is quieter, so that small noise does not move it.
KEY_SCALE, TEXT_SCALE = 3.0, 0.3
#: A power of two, which the exponents of FP8 blocks can take. The probe had a third.
OUTPUT_SCALE = 0.25
#: Penalty of the fit, see `Ridge`.
ROW_STRENGTH = 1e-3


def rescale(folder: Path, config: dict) -> None:
    """Sharper attention in every layer, drafts left as they are."""
    inplace.replace(folder, "embed.weight", inplace.read(folder, "embed.weight") * TEXT_SCALE)
    part = "scale" if "quantization_config" in config else "weight"
    for index in range(config["num_hidden_layers"]):
        attention = f"layers.{index}.attn."
        norms = [f"{attention}kv_norm.weight"]
        if config["compress_ratios"][index]:
            norms.append(f"{attention}compressor.norm.weight")
        for name in norms:
            inplace.replace(folder, name, inplace.read(folder, name).float() * KEY_SCALE)
        name = f"{attention}wo_a.{part}"
        inplace.replace(folder, name, inplace.read(folder, name).float() * OUTPUT_SCALE)


def fit_cells(eyes: Eyes, count: int) -> torch.Tensor:
    """(hidden + 1, targets) from the aligner's rows and a constant to what each cell shows."""
    config, device = eyes.vision.config, str(eyes.vision.embed.device)
    width = eyes.vision.weights["aligner.w2.weight"].shape[1]
    side = config["vision_patch_size"] * config["vision_downsample_ratio"]
    ridge = Ridge(width + 1, TARGETS, device)
    for number in range(count):
        rows = eyes.features(number)[0]
        rows = torch.cat((rows, rows.new_ones(len(rows), 1)), dim=1)
        ridge.add(rows, torch.from_numpy(sights.coverage(eyes.pictures[number], side)))
    return ridge.solve(ROW_STRENGTH)


def directions(hidden: int, seed: int, sought: torch.Tensor | None = None) -> torch.Tensor:
    """(hidden, targets + 1) of rms 1: one for each target, then the constant's.

    The last target, presence over area, lies along ``sought`` and the constant partly against it,
    so that the answering row reads the shape's cells and not the background's. The others are
    orthogonal to both.
    """
    square = torch.randn(hidden, TARGETS + 1, generator=torch.Generator().manual_seed(seed))
    if sought is None:
        return torch.linalg.qr(square).Q * hidden**0.5
    square[:, 0] = sought.cpu()
    basis = torch.linalg.qr(square).Q * hidden**0.5
    share = basis[:, :1] * torch.sign(basis[:, 0] @ sought.cpu())
    constant = (basis[:, -1:] - share) * 0.5**0.5
    return torch.cat((basis[:, 1:-1], share, constant), dim=1)


def sought(model: ReferenceLM, eyes: Eyes, asked: Sequence[Asked]) -> torch.Tensor:
    """(hidden,) of norm 1: the residual whose keys the answering row's queries score highest.

    Of one prompt a question, over heads and layers. What turns with the position is left out.
    """
    rope = model.model.config.qk_rope_head_dim
    found: list[torch.Tensor] = []
    hooks = []
    for layer in model.model.layers:

        def keep(_m: object, _a: object, queries: torch.Tensor, layer: object = layer) -> None:
            query = queries[0, :, -2].clone()  # (heads, dim) of the row that answers
            query[:, -rope:] = 0
            attention = layer.self_attn
            key = (query * attention.kv_norm.weight).sum(0) @ attention.kv_proj.weight
            key = key * layer.input_layernorm.weight
            found.append(key / key.norm())

        hooks.append(layer.self_attn.q_b_norm.register_forward_hook(keep))
    try:
        for question in {each.question.name for each in asked}:
            model.last([eyes.prompt(next(e for e in asked if e.question.name == question))])
    finally:
        for hook in hooks:
            hook.remove()
    whole = torch.stack(found).sum(0)
    return whole / whole.norm()


def lay(folder: Path, vision: ReferenceVision, cells: torch.Tensor, onto: torch.Tensor) -> None:
    """Replaces ``aligner.w2`` and its bias, in the folder and in ``vision``."""
    onto = onto.to(cells.device)
    gains = torch.full((TARGETS,), GAIN, device=cells.device)
    gains[-1] = SHARE_GAIN
    weight = onto[:, :-1] @ (cells[:-1] * gains).T
    bias = onto[:, :-1] @ (cells[-1] * gains) + onto[:, -1]
    for name, value in (("aligner.w2.weight", weight), ("aligner.w2.bias", bias)):
        inplace.replace(folder, name, value)
        # As the file rounds it.
        vision.weights[name] = value.bfloat16().float()
