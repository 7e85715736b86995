"""The values of the released config.json of DeepSeek-V4-Flash-Vision-Exp, by topic.

Standard library only: the GPU checks read this on a machine that has torch and little else.
"""

from __future__ import annotations

from typing import Any

LAYERS, DRAFT_LAYERS = 43, 3

LANGUAGE: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "hidden_act": "silu",
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
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
    "compress_rope_theta": 160000.0,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1048576,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_cache": True,
    "num_nextn_predict_layers": DRAFT_LAYERS,
}
TEXT_EPS, VISION_EPS = 1e-6, 1e-20  # rms_norm_eps of the text-only and the vision checkpoint

QUANTIZED: dict[str, Any] = {
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}

DRAFT: dict[str, Any] = {
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [LAYERS - 3, LAYERS - 2, LAYERS - 1],
    "dspark_markov_rank": 256,
}

#: A text-only checkpoint has none of these keys.
VISION: dict[str, Any] = {
    "vision_n_layers": 32,
    "vision_dim": 1024,
    "vision_n_heads": 16,
    "vision_inter_dim": 2816,
    "vision_patch_size": 14,
    "vision_rope_theta": 10000.0,
    "vision_downsample_ratio": 3,
    "vision_max_n_token": 384,
    "vision_min_pixels": 147456,
    "vision_max_wh_ratio": 8,
}


def compress_ratios(layers: int = LAYERS) -> list[int]:
    """Of the first `layers` layers and the three drafts."""
    return ([0, 0] + [4, 128] * layers)[:layers] + [0] * DRAFT_LAYERS
