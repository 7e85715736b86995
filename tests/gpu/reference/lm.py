"""The language model in float32, from transformers' own deepseek_v4, with image rules added here.

transformers knows nothing of images: what an image row routes by and what it sees is written out
below from the model's description, not from the code under test.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from gpu.reference import weights as reference_weights
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Model,
    DeepseekV4RotaryEmbedding,
)

_RENAMES = [
    (r"^embed\.", "embed_tokens."),
    (r"^hc_head_", "hc_head.hc_"),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    (r"\.attn\.indexer\.compressor\.", ".attn.compressor.indexer."),
    (r"\.attn\.indexer\.weights_proj\.", ".attn.compressor.indexer.scorer.weights_proj."),
    (r"\.attn\.indexer\.", ".attn.compressor.indexer."),
    (r"\.attn_sink$", ".sinks"),
    (r"\.(wq_a|wq_b|wkv|wo_a|wo_b|wgate)\.", lambda m: f".{_PROJECTIONS[m[1]]}."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"(compressor(?:\.indexer)?)\.norm\.", r"\1.kv_norm."),
    (r"\.ape$", ".position_bias"),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.shared_experts\.(w1|w2|w3)\.", lambda m: f".shared_experts.{_PROJECTIONS[m[1]]}."),
]
_PROJECTIONS = {
    "wq_a": "q_a_proj",
    "wq_b": "q_b_proj",
    "wkv": "kv_proj",
    "wo_a": "o_a_proj",
    "wo_b": "o_b_proj",
    "wgate": "gate_proj",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}


@dataclass
class Prompt:
    """One sequence: ``ids`` (n,) int64, ``embeds`` (n, hidden) float32, inclusive image ``spans``.

    A span runs from START to END; ``image_rows`` (n,) bool also holds the pads before START.
    """

    ids: torch.Tensor
    embeds: torch.Tensor
    image_rows: torch.Tensor
    spans: list[tuple[int, int]]


@dataclass
class Result:
    """``last`` (n, hidden): after the final norm. ``experts``: per layer (n, top_k), sorted ids."""

    last: torch.Tensor
    logits: torch.Tensor
    experts: list[torch.Tensor] = field(default_factory=list)


class ReferenceLM:
    """Float32 model of a checkpoint folder. ``eps`` replaces the config's rms_norm_eps."""

    def __init__(self, folder: Path, *, device: str = "cpu", eps: float = 1e-6) -> None:
        config = json.loads((folder / "config.json").read_text())
        weights = reference_weights.load(folder, _is_language_model, device)
        self.head = weights.pop("head.weight")
        self.bias_vl = [
            weights.pop(f"layers.{index}.ffn.gate.bias_vl", None)
            for index in range(config["num_hidden_layers"])
        ]
        for index in range(config["num_hash_layers"]):
            weights.pop(f"layers.{index}.ffn.gate.bias", None)
        self.model = _build(config, eps, device)
        _check_complete(self.model.load_state_dict(_renamed(weights), strict=False, assign=True))
        left = [n for n, t in self.model.named_buffers() if t.is_meta]
        if left:
            raise ValueError(f"the reference model has buffers without values: {left}")
        self.model.float().eval()
        for layer, bias in zip(self.model.layers, self.bias_vl, strict=True):
            _route_images(layer.mlp, bias, self)
        self.image_rows = torch.zeros(0, dtype=torch.bool)
        self.experts: list[torch.Tensor] = []

    @torch.inference_mode()
    def __call__(
        self, prompt: Prompt, *, visibility: bool = True, image_routing: bool = True
    ) -> Result:
        """Runs the prompt cold. The switches turn image rules off, to show that they matter."""
        last = self.last([prompt], visibility=visibility, image_routing=image_routing)[0]
        return Result(last, last @ self.head.T, self.experts)

    @torch.inference_mode()
    def last(
        self, prompts: list[Prompt], *, visibility: bool = True, image_routing: bool = True
    ) -> torch.Tensor:
        """(prompts, n, hidden) after the final norm, of prompts of one length with equal spans."""
        device = self.head.device
        prompt, count = prompts[0], prompts[0].ids.numel()
        if any(each.ids.numel() != count or each.spans != prompt.spans for each in prompts):
            raise ValueError("prompts of one batch must have one length and the same spans")
        positions = torch.arange(count, device=device)[None].expand(len(prompts), -1)
        embeds = torch.stack([each.embeds.to(device, torch.float32) for each in prompts])
        rows = torch.cat([each.image_rows for each in prompts])
        self.image_rows = rows.to(device) & image_routing
        self.experts = []
        model = self.model
        rope = {
            kind: model.rotary_emb(embeds, position_ids=positions, layer_type=kind)
            for kind in ("main", "compress")
        }
        window = model.config.sliding_window
        mask = visible(count, window, prompt.spans if visibility else [], device)
        bias = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, float("-inf"))
        ids = torch.stack([each.ids for each in prompts]).to(device)
        states = embeds.unsqueeze(2).repeat(1, 1, model.config.hc_mult, 1)
        for layer in model.layers:
            states = layer(
                states,
                input_ids=ids,
                position_embeddings=rope,
                position_ids=positions,
                attention_mask=bias[None, None].expand(len(prompts), 1, -1, -1),
                past_key_values=None,
            )
        return model.norm(model.hc_head(states))


def visible(count: int, window: int, spans: list[tuple[int, int]], device: str) -> torch.Tensor:
    """(count, count) bool: row i may read key j in the sliding-window branch."""
    row = torch.arange(count, device=device)[:, None]
    key = torch.arange(count, device=device)[None, :]
    mask = (key <= row) & (key > row - window)
    for start, end in spans:
        inside = (row >= start) & (row <= end) & (key >= start) & (key <= end)
        mask |= inside
    return mask


def _route_images(block: torch.nn.Module, bias: torch.Tensor | None, owner: ReferenceLM) -> None:
    """Makes the block's gate choose image rows by the unbiased scores plus ``bias_vl``."""
    gate = block.gate
    plain = gate.forward

    def route(hidden: torch.Tensor, *ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits, weights, chosen = plain(hidden, *ids)
        rows = owner.image_rows
        if bias is not None and bool(rows.any()):
            scores = torch.sqrt(torch.nn.functional.softplus(logits))
            mine = torch.topk(scores + bias, chosen.shape[1], dim=-1).indices
            share = scores.gather(1, mine)
            share = share / share.sum(dim=-1, keepdim=True) * gate.routed_scaling_factor
            weights = torch.where(rows[:, None], share, weights)
            chosen = torch.where(rows[:, None], mine, chosen)
        owner.experts.append(chosen.sort(dim=-1).values)
        return logits, weights, chosen

    gate.routed_scaling_factor = block.gate.routed_scaling_factor
    gate.forward = route


def _build(config: dict, eps: float, device: str) -> DeepseekV4Model:
    keys = {k: v for k, v in config.items() if not k.startswith(("vision_", "dspark_"))}
    for key in ("quantization_config", "expert_dtype", "architectures", "model_type"):
        keys.pop(key, None)
    yarn = dict(keys.pop("rope_scaling"))
    yarn["rope_type"] = yarn.pop("type")
    partial = keys["qk_rope_head_dim"] / keys["head_dim"]
    # vLLM stretches the rotary of every layer, also of those without a compressor.
    shared = yarn | {"partial_rotary_factor": partial, "attention_factor": 1.0}
    keys["rope_parameters"] = {
        "main": shared | {"rope_theta": keys["rope_theta"]},
        "compress": shared | {"rope_theta": keys["compress_rope_theta"]},
    }
    keys["rms_norm_eps"] = eps
    hf_config = DeepseekV4Config(**keys)
    hf_config._attn_implementation = "eager"
    hf_config._experts_implementation = "eager"
    # The weights come from the checkpoint: only what the config alone decides is computed here.
    with torch.device("meta"):
        model = DeepseekV4Model(hf_config)
    for module in model.modules():
        if isinstance(getattr(module, "rotary_emb", None), DeepseekV4RotaryEmbedding):
            module.rotary_emb = DeepseekV4RotaryEmbedding(hf_config).to(device)
    return model


def _is_language_model(name: str) -> bool:
    return name.startswith(("embed.", "head.", "norm.", "hc_head", "layers."))


def _renamed(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Checkpoint names to transformers' names; a layer's experts become two stacked tensors.

    Empties ``weights`` on the way, for want of room for a second copy.
    """
    renamed: dict[str, torch.Tensor] = {}
    stacks: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name in list(weights):
        value = weights.pop(name)
        expert = re.match(r"(.*)\.ffn\.experts\.(\d+)\.(w[123])\.weight$", name)
        if expert:
            stacks.setdefault(expert[1], {})[int(expert[2]), expert[3]] = value
            continue
        for pattern, target in _RENAMES:
            name = re.sub(pattern, target, name)
        renamed[name] = value
    for prefix in list(stacks):
        parts = stacks.pop(prefix)
        count = 1 + max(index for index, _ in parts)
        gate_up = [torch.cat((parts[i, "w1"], parts[i, "w3"])) for i in range(count)]
        renamed[f"{prefix}.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        down = torch.stack([parts[i, "w2"] for i in range(count)])
        renamed[f"{prefix}.mlp.experts.down_proj"] = down
    return renamed


def _check_complete(result: object) -> None:
    problems = [*result.missing_keys, *result.unexpected_keys]
    if problems:
        raise ValueError(f"the reference model and the checkpoint differ in {problems[:8]}")
