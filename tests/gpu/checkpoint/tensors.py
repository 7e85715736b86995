"""Names, shapes, dtypes and random contents of a Vision-Exp checkpoint in the released layout.

Everything is random bytes looked up in a table of 256 normal quantiles: the same seed gives the
same bytes on every machine, and 7 GB take seconds. Scales are chosen so that a row of rms 1 stays
near rms 1 through every block, and so that what the tests look for is loud: attention moves the
residual as much as the experts do, and the byte tokens stand out of the logits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch

FP8_BLOCK = 128
FP4_BLOCK = 32
#: rms of the 16 codes of e2m1, drawn evenly.
_FP4_RMS = 2.93
#: rms that the e4m3 codes are drawn with; the block scale does the rest.
_FP8_RMS = 64.0
#: Bytes in the test tokenizer: their rows of the head are louder, so that answers are text.
_LOUD_ROWS = slice(3, 259)

_QUANTILES = np.array([NormalDist().inv_cdf((i + 0.5) / 256) for i in range(256)], dtype=np.float32)
_QUANTILES /= np.sqrt((_QUANTILES**2).mean())


@dataclass(frozen=True)
class Spec:
    """One tensor: ``fill`` is normal, fp8, fp4, exponent (ue8m0 scale) or table (token to experts).

    ``std`` and ``mean`` are those of the values, for fp8 and fp4 those after scaling.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: str = "normal"
    std: float = 1.0
    mean: float = 0.0


def specs(config: dict) -> Iterator[Spec]:
    """All tensors of the checkpoint that ``config`` (a config.json) describes, in file order."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield Spec("embed.weight", (vocab, hidden), torch.bfloat16)
    yield Spec("head.weight", (vocab, hidden), torch.bfloat16, std=4 / hidden**0.5)
    yield from _head_stack("", config)
    for index in range(config["num_hidden_layers"]):
        ratio = config["compress_ratios"][index]
        hashed = index < config["num_hash_layers"]
        yield from _layer(f"layers.{index}.", config, ratio=ratio, hashed=hashed)
    for index in range(config["num_nextn_predict_layers"] if "dspark_block_size" in config else 0):
        yield from _draft(index, config)
    if config.get("vision_n_layers", 0):
        yield from _vision(config)


def tensor(spec: Spec, seed: int, config: dict) -> torch.Tensor:
    """The contents of ``spec``, on the CPU; a function of its fields and ``seed`` alone."""
    digest = hashlib.sha256(f"{seed}:{spec.name}".encode()).digest()
    rng = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))
    if spec.fill == "table":
        return _expert_table(spec, rng, config["n_routed_experts"])
    codes = rng.integers(0, 256, size=spec.shape, dtype=np.uint8)
    if spec.fill == "fp4":
        return torch.from_numpy(codes).view(torch.int8)
    if spec.fill == "exponent":
        exponent = 127 + round(np.log2(spec.std))
        return torch.from_numpy(codes % 2 + np.uint8(exponent)).view(torch.float8_e8m0fnu)
    if spec.fill == "fp8":
        table = (torch.from_numpy(_QUANTILES) * _FP8_RMS).to(torch.float8_e4m3fn)
        return torch.from_numpy(table.view(torch.uint8).numpy()[codes]).view(torch.float8_e4m3fn)
    table = torch.from_numpy(_QUANTILES * np.float32(spec.std) + np.float32(spec.mean))
    if spec.dtype == torch.bfloat16:
        words = table.to(torch.bfloat16).view(torch.int16).numpy()[codes]
        values = torch.from_numpy(words).view(torch.bfloat16)
    else:
        values = torch.from_numpy(table.numpy()[codes]).to(spec.dtype)
    if spec.name == "head.weight" and spec.shape[0] > _LOUD_ROWS.stop:
        quiet = torch.full((spec.shape[0], 1), 0.25, dtype=values.dtype)
        quiet[_LOUD_ROWS] = 1
        values *= quiet
    return values


def _expert_table(spec: Spec, rng: np.random.Generator, experts: int) -> torch.Tensor:
    """Distinct experts per token: start, start + step, ... with a step prime to ``experts``."""
    tokens, top_k = spec.shape
    steps = np.array([s for s in range(1, experts + 1) if np.gcd(s, experts) == 1])
    start = rng.integers(0, experts, size=(tokens, 1))
    step = rng.choice(steps, size=(tokens, 1))
    return torch.from_numpy((start + step * np.arange(top_k)) % experts).to(spec.dtype)


def _linear(name: str, rows: int, cols: int, config: dict, *, gain: float = 1.0) -> Iterator[Spec]:
    """A block-FP8 linear layer and its scales, or a BF16 one if the config has no quantisation."""
    std = gain / cols**0.5
    if "quantization_config" not in config:
        yield Spec(f"{name}.weight", (rows, cols), torch.bfloat16, std=std)
        return
    yield Spec(f"{name}.weight", (rows, cols), torch.float8_e4m3fn, fill="fp8", std=std)
    blocks = (-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK))
    # Each block takes the exponent or the next one: rms 1.58 of the lower.
    scale = std / _FP8_RMS / 1.58
    yield Spec(f"{name}.scale", blocks, torch.float8_e8m0fnu, fill="exponent", std=scale)


def _expert(name: str, rows: int, cols: int, config: dict) -> Iterator[Spec]:
    std = 1 / cols**0.5
    if "quantization_config" not in config:
        yield Spec(f"{name}.weight", (rows, cols), torch.bfloat16, std=std)
        return
    yield Spec(f"{name}.weight", (rows, cols // 2), torch.int8, fill="fp4", std=std)
    scale = std / _FP4_RMS / 1.58
    yield Spec(
        f"{name}.scale",
        (rows, cols // FP4_BLOCK),
        torch.float8_e8m0fnu,
        fill="exponent",
        std=scale,
    )


def _norm(name: str, size: int) -> Spec:
    return Spec(f"{name}.weight", (size,), torch.bfloat16, std=0.1, mean=1.0)


def _hyper(prefix: str, rows: int, config: dict) -> Iterator[Spec]:
    """One hyper-connection: ``rows`` mixing logits from the ``hc_mult`` residual streams."""
    width = config["hc_mult"] * config["hidden_size"]
    scales = 1 if rows == config["hc_mult"] else 3
    yield Spec(f"{prefix}_fn", (rows, width), torch.float32, std=width**-0.5)
    yield Spec(f"{prefix}_base", (rows,), torch.float32, std=0.5)
    yield Spec(f"{prefix}_scale", (scales,), torch.float32, std=0.1, mean=0.7)


def _head_stack(prefix: str, config: dict) -> Iterator[Spec]:
    yield _norm(f"{prefix}norm", config["hidden_size"])
    yield from _hyper(f"{prefix}hc_head", config["hc_mult"], config)


def _compressor(prefix: str, ratio: int, head_dim: int, config: dict) -> Iterator[Spec]:
    width = head_dim * (2 if ratio == 4 else 1)  # groups of four overlap their neighbour
    hidden = config["hidden_size"]
    yield Spec(f"{prefix}wkv.weight", (width, hidden), torch.bfloat16, std=hidden**-0.5)
    yield Spec(f"{prefix}wgate.weight", (width, hidden), torch.bfloat16, std=hidden**-0.5)
    yield Spec(f"{prefix}ape", (ratio, width), torch.float32, std=0.5)
    yield _norm(f"{prefix}norm", head_dim)


def _attention(prefix: str, ratio: int, config: dict) -> Iterator[Spec]:
    hidden, heads, dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    q_rank, groups = config["q_lora_rank"], config["o_groups"]
    o_rank = groups * config["o_lora_rank"]
    yield Spec(f"{prefix}attn_sink", (heads,), torch.float32)
    yield from _linear(f"{prefix}wq_a", q_rank, hidden, config)
    yield _norm(f"{prefix}q_norm", q_rank)
    yield from _linear(f"{prefix}wq_b", heads * dim, q_rank, config)
    yield from _linear(f"{prefix}wkv", dim, hidden, config)
    yield _norm(f"{prefix}kv_norm", dim)
    yield from _linear(f"{prefix}wo_a", o_rank, heads * dim // groups, config, gain=2)
    yield from _linear(f"{prefix}wo_b", hidden, o_rank, config, gain=2)
    if ratio:
        yield from _compressor(f"{prefix}compressor.", ratio, dim, config)
    if ratio == 4:
        index_dim, index_heads = config["index_head_dim"], config["index_n_heads"]
        yield from _linear(f"{prefix}indexer.wq_b", index_heads * index_dim, q_rank, config)
        std = hidden**-0.5
        name = f"{prefix}indexer.weights_proj.weight"
        yield Spec(name, (index_heads, hidden), torch.bfloat16, std=std)
        yield from _compressor(f"{prefix}indexer.compressor.", ratio, index_dim, config)


def _feed_forward(prefix: str, config: dict, *, hashed: bool) -> Iterator[Spec]:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    experts, top_k = config["n_routed_experts"], config["num_experts_per_tok"]
    vision = config.get("vision_n_layers", 0) > 0
    gate = f"{prefix}gate."
    yield Spec(f"{gate}weight", (experts, hidden), torch.bfloat16, std=1.5 * hidden**-0.5)
    if hashed:
        yield Spec(f"{gate}tid2eid", (config["vocab_size"], top_k), torch.int32, fill="table")
    if vision or not hashed:
        yield Spec(f"{gate}bias", (experts,), torch.float32, std=0.2)
    if vision:
        yield Spec(f"{gate}bias_vl", (experts,), torch.float32, std=0.5)
    shapes = {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}
    for index in range(experts):
        for name, shape in shapes.items():
            yield from _expert(f"{prefix}experts.{index}.{name}", *shape, config)
    for name, shape in shapes.items():
        yield from _linear(f"{prefix}shared_experts.{name}", *shape, config)


def _layer(prefix: str, config: dict, *, ratio: int, hashed: bool) -> Iterator[Spec]:
    mixing = (2 + config["hc_mult"]) * config["hc_mult"]
    yield _norm(f"{prefix}attn_norm", config["hidden_size"])
    yield _norm(f"{prefix}ffn_norm", config["hidden_size"])
    yield from _hyper(f"{prefix}hc_attn", mixing, config)
    yield from _hyper(f"{prefix}hc_ffn", mixing, config)
    yield from _attention(f"{prefix}attn.", ratio, config)
    yield from _feed_forward(f"{prefix}ffn.", config, hashed=hashed)


def _draft(index: int, config: dict) -> Iterator[Spec]:
    """A draft layer; the first also carries the context projection, the last the heads."""
    prefix, hidden = f"mtp.{index}.", config["hidden_size"]
    yield from _layer(prefix, config, ratio=0, hashed=False)
    if index == 0:
        targets = len(config["dspark_target_layer_ids"])
        yield from _linear(f"{prefix}main_proj", hidden, hidden * targets, config)
        yield _norm(f"{prefix}main_norm", hidden)
    if index == config["num_nextn_predict_layers"] - 1:
        yield from _head_stack(prefix, config)
        vocab, rank = config["vocab_size"], config["dspark_markov_rank"]
        for half in ("markov_w1", "markov_w2"):
            name = f"{prefix}markov_head.{half}.weight"
            yield Spec(name, (vocab, rank), torch.bfloat16, std=rank**-0.5)
        confidence = f"{prefix}confidence_head.proj.weight"
        yield Spec(confidence, (1, hidden + rank), torch.float32, std=hidden**-0.5)


def _vision(config: dict) -> Iterator[Spec]:
    dim, inner, hidden = config["vision_dim"], config["vision_inter_dim"], config["hidden_size"]
    patch = 3 * config["vision_patch_size"] ** 2
    merged = dim * config["vision_downsample_ratio"] ** 2

    def dense(name: str, rows: int, cols: int, *, bias: bool, gain: float = 1.0) -> Iterator[Spec]:
        yield Spec(f"{name}.weight", (rows, cols), torch.bfloat16, std=gain * cols**-0.5)
        if bias:
            yield Spec(f"{name}.bias", (rows,), torch.bfloat16, std=0.1)

    yield from dense("vision.patch_embed.proj", dim, patch, bias=True, gain=2)
    for index in range(config["vision_n_layers"]):
        block = f"vision.blocks.{index}."
        yield _norm(f"{block}norm1", dim)
        yield _norm(f"{block}norm2", dim)
        yield from dense(f"{block}attn.wqkv", 3 * dim, dim, bias=True)
        yield from dense(f"{block}attn.wo", dim, dim, bias=True)
        yield from dense(f"{block}mlp.w1", 2 * inner, dim, bias=False)
        yield from dense(f"{block}mlp.w2", dim, inner, bias=False)
    yield _norm("vision.norm", dim)
    yield from dense("aligner.w1", hidden, merged, bias=True)
    yield from dense("aligner.w2", hidden, hidden, bias=True, gain=2)
    for name in ("image_start", "image_end", "image_newline", "image_pad"):
        yield Spec(name, (hidden,), torch.bfloat16)
