"""A small Vision-Exp config.json with the real checkpoint's keys, for tests on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import released_config as released

SMALL: dict[str, Any] = {
    "max_position_embeddings": 8192,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 128,
    "q_lora_rank": 64,
    "o_lora_rank": 64,
    "o_groups": 2,
    "n_routed_experts": 8,
    "moe_intermediate_size": 64,
    "compress_ratios": [0, 0, 4, 128, 0],
    "index_n_heads": 4,
    "index_head_dim": 64,
    "dspark_target_layer_ids": [1, 2, 3],
    "dspark_markov_rank": 16,
    "vision_n_layers": 2,
    "vision_dim": 128,
    "vision_n_heads": 2,
    "vision_inter_dim": 192,
}
VISION_EXP: dict[str, Any] = {
    **released.LANGUAGE,
    **released.DRAFT,
    **released.VISION,
    "expert_dtype": released.QUANTIZED["expert_dtype"],  # but weights that a CPU can use
    "rms_norm_eps": released.VISION_EPS,
    **SMALL,
}


def vision_config(**overrides: Any) -> dict[str, Any]:
    """The tiny config as a dict; a key overridden with None is left out."""
    merged = {**VISION_EXP, **overrides}
    return {key: value for key, value in merged.items() if value is not None}


def text_config(**overrides: Any) -> dict[str, Any]:
    """The same sizes as the text-only checkpoint has them: no vision keys, eps 1e-6."""
    vision = {key: None for key in VISION_EXP if key.startswith("vision_")}
    text = {"rms_norm_eps": released.TEXT_EPS, "num_nextn_predict_layers": 1}
    return vision_config(**{**vision, **text, **overrides})


def write(folder: Path, **overrides: Any) -> Path:
    """Write config.json of a tiny Vision-Exp checkpoint into `folder`; returns `folder`."""
    return _write(folder, vision_config(**overrides))


def write_text_only(folder: Path, **overrides: Any) -> Path:
    """Write config.json of a tiny text-only DeepSeek-V4 checkpoint; returns `folder`."""
    return _write(folder, text_config(**overrides))


def _write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder
