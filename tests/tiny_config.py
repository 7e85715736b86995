"""A small Vision-Exp config.json with the real checkpoint's keys, for tests on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VISION_EXP: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "dtype": "bfloat16",
    "vocab_size": 129280,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 64,
    "o_lora_rank": 64,
    "o_groups": 2,
    "hidden_act": "silu",
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 64,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "num_hash_layers": 3,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "sliding_window": 128,
    "compress_ratios": [0, 0, 4, 128, 0],
    "compress_rope_theta": 160000.0,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "index_n_heads": 4,
    "index_head_dim": 64,
    "index_topk": 512,
    "expert_dtype": "fp4",
    "rms_norm_eps": 1e-20,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [1, 2, 3],
    "dspark_markov_rank": 16,
    "vision_n_layers": 2,
    "vision_dim": 128,
    "vision_n_heads": 2,
    "vision_inter_dim": 192,
    "vision_patch_size": 14,
    "vision_rope_theta": 10000.0,
    "vision_downsample_ratio": 3,
    "vision_max_n_token": 384,
    "vision_min_pixels": 147456,
    "vision_max_wh_ratio": 8,
}


def vision_config(**overrides: Any) -> dict[str, Any]:
    """The tiny config as a dict; a key overridden with None is left out."""
    merged = {**VISION_EXP, **overrides}
    return {key: value for key, value in merged.items() if value is not None}


def text_config(**overrides: Any) -> dict[str, Any]:
    """The same sizes as the text-only checkpoint has them: no vision keys, eps 1e-6."""
    vision = {key: None for key in VISION_EXP if key.startswith("vision_")}
    text = {"rms_norm_eps": 1e-6, "num_nextn_predict_layers": 1}
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
