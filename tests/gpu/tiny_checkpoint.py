"""Writes a small, valid Vision-Exp checkpoint: real names, widths and dtypes, few layers, experts.

    python tests/gpu/tiny_checkpoint.py FOLDER [--seed N] [--text-only] [--vision-layers N]

Random weights, the same for the same seed on any machine. A text-only checkpoint of the same seed
has the same language model: its tensors are the vision checkpoint's without what vision adds.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tiny_tokenizer
from gpu.checkpoint_tensors import Spec, specs, tensor

#: Added to every vision checkpoint's config; a text-only one has none of these keys.
VISION_KEYS = {
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
VISION_EXTRA = ("vision.", "aligner.", "image_")


def config_json(
    *,
    layers: int = 5,
    experts: int = 32,
    draft_layers: int = 3,
    vision_layers: int = 2,
    quantized: bool = True,
    **overrides: object,
) -> dict:
    """The config.json: the released values, but for the counts given here and ``overrides``."""
    pattern = [0, 0] + [4, 128] * layers
    config: dict = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "vocab_size": tiny_tokenizer.VOCAB_SIZE,
        "hidden_size": 4096,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1024,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "hidden_act": "silu",
        "n_routed_experts": experts,
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
        "compress_ratios": pattern[:layers] + [0] * 3,
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
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "num_nextn_predict_layers": draft_layers,
    }
    if quantized:
        config["expert_dtype"] = "fp4"
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        }
    if draft_layers:
        config["dspark_block_size"] = 5
        config["dspark_noise_token_id"] = 128799
        config["dspark_target_layer_ids"] = list(range(max(layers - 3, 0), layers))
        config["dspark_markov_rank"] = 256
    if vision_layers:
        config |= VISION_KEYS | {"vision_n_layers": vision_layers, "rms_norm_eps": 1e-20}
    return config | overrides


def write(
    folder: Path,
    *,
    seed: int = 0,
    vision_layers: int = 2,
    layers: int = 5,
    experts: int = 32,
    draft_layers: int = 3,
    quantized: bool = True,
    **overrides: object,
) -> Path:
    """Writes config.json, the shards with their index, and the tokenizer; returns ``folder``.

    ``vision_layers=0`` writes a text-only checkpoint. ``overrides`` replace config keys (smaller
    widths for the CPU: keep widths multiples of 128 when ``quantized``).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = config_json(
        layers=layers,
        experts=experts,
        draft_layers=draft_layers,
        vision_layers=vision_layers,
        quantized=quantized,
        **overrides,
    )
    tiny_tokenizer.write(folder)
    shards = _shards(config)
    with ThreadPoolExecutor(8) as pool:
        sizes = list(pool.map(lambda item: _save(folder, item, seed, config), shards.items()))
    weight_map = {spec.name: name for name, members in shards.items() for spec in members}
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    _json(folder / "model.safetensors.index.json", index)
    _json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    _json(folder / "config.json", config)
    return folder


def _shards(config: dict) -> dict[str, list[Spec]]:
    """One file per layer, one for the vision part, one for the rest."""
    groups: dict[str, list[Spec]] = {}
    for spec in specs(config):
        parts = spec.name.split(".")
        key = ".".join(parts[:2]) if parts[0] in ("layers", "mtp") else "top"
        groups.setdefault("vision" if spec.name.startswith(VISION_EXTRA) else key, []).append(spec)
    width = len(groups)
    return {
        f"model-{i:05}-of-{width:05}.safetensors": members
        for i, members in enumerate(groups.values(), start=1)
    }


def _save(folder: Path, item: tuple[str, list[Spec]], seed: int, config: dict) -> int:
    name, members = item
    tensors = {spec.name: tensor(spec, seed, config) for spec in members}
    save_file(tensors, folder / name, metadata={"format": "pt"})
    return sum(value.nbytes for value in tensors.values())


def _json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text-only", action="store_true")
    parser.add_argument("--vision-layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=32)
    args = parser.parse_args()
    layers = 0 if args.text_only else args.vision_layers
    write(args.folder, seed=args.seed, vision_layers=layers, experts=args.experts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
