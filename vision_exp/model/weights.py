"""Homes for the tensors that a Vision-Exp checkpoint has beyond a text-only one.

| tensors | home |
|---|---|
| `vision.*`, `aligner.*`, `image_{start,end,newline,pad}` | the parameter of that name |
| `layers.N.ffn.gate.bias_vl` | `model.layers.N.ffn.gate.e_score_correction_bias_vl` |
| `mtp.N.ffn.gate.bias_vl` | the drafts (the target's loader drops all of `mtp.`) |
| `layers.N.ffn.gate.bias` of hash layers | none: routing of hash layers reads no bias |

The weights are one stream: these tensors are taken out of it in any order, and everything else goes
to vLLM's own loader, which is called once and never sees them, nor maps their names.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vision_exp.config import VisionConfig
from vision_exp.model.registry import read_config

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.model_executor.model_loader.weight_utils:default_weight_loader(param, loaded_weight)",
    "vllm.models.deepseek_v4.nvidia.model:DeepseekV4Model.layers",
    "vllm.models.deepseek_v4.nvidia.model:DeepseekV4DecoderLayer.ffn",
)

Weights = Iterable[tuple[str, torch.Tensor]]

logger = logging.getLogger("vllm.vision_exp")

_TOWER = re.compile(r"(vision|aligner)\.|image_(start|end|newline|pad)$")
_BIAS_VL = re.compile(r"layers\.(\d+)\.ffn\.gate\.bias_vl$")
_BIAS = re.compile(r"layers\.(\d+)\.ffn\.gate\.bias$")
_VISION_SIDE = re.compile(r"vision|aligner|image_|layers\..*_vl$")
# Written in bfloat16 (tower) and float32 (biases); either converts to the other's parameter.
_DTYPES = (torch.bfloat16, torch.float32)


class WeightsError(RuntimeError):
    """A tensor without a home, a parameter without a tensor, or a wrong shape or dtype."""


@dataclass(frozen=True)
class Home:
    """Where one checkpoint tensor goes: a parameter, and the shape that the whole tensor has."""

    parameter_name: str
    parameter: torch.nn.Parameter
    shape: tuple[int, ...]


def tower_shapes(config: VisionConfig) -> dict[str, tuple[int, ...]]:
    """Checkpoint name and shape of each tensor of tower, aligner and learned vectors."""
    dim, inter, hidden = config.dim, config.inter_dim, config.hidden_size
    patch = 3 * config.patch_size**2
    merged = dim * config.downsample_ratio**2
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj.weight": (dim, patch),
        "vision.patch_embed.proj.bias": (dim,),
        "vision.norm.weight": (dim,),
        "aligner.w1.weight": (hidden, merged),
        "aligner.w1.bias": (hidden,),
        "aligner.w2.weight": (hidden, hidden),
        "aligner.w2.bias": (hidden,),
    }
    for layer in range(config.n_layers):
        shapes |= {
            f"vision.blocks.{layer}.{name}": shape
            for name, shape in (
                ("norm1.weight", (dim,)),
                ("norm2.weight", (dim,)),
                ("attn.wqkv.weight", (3 * dim, dim)),
                ("attn.wqkv.bias", (3 * dim,)),
                ("attn.wo.weight", (dim, dim)),
                ("attn.wo.bias", (dim,)),
                ("mlp.w1.weight", (2 * inter, dim)),
                ("mlp.w2.weight", (dim, inter)),
            )
        }
    for name in ("image_start", "image_end", "image_newline", "image_pad"):
        shapes[name] = (hidden,)
    return shapes


def find_homes(model: Any) -> dict[str, Home]:
    """Checkpoint name -> home, for what this rank holds.

    Raises WeightsError if the built modules have a parameter that no checkpoint tensor fills, or
    lack one.
    """
    parameters = dict(model.named_parameters())
    homes: dict[str, Home] = {}
    if model.no_tower is None:
        built = {name for name in parameters if _TOWER.match(name)}
        shapes = tower_shapes(read_config(model.config))
        if built != shapes.keys():
            raise WeightsError(f"tower parameters differ: {_some(built ^ shapes.keys())}")
        homes |= {name: Home(name, parameters[name], shape) for name, shape in shapes.items()}
    experts = (model.config.n_routed_experts,)
    for name, parameter in parameters.items():
        layer = re.fullmatch(r"model\.(layers\.\d+\.ffn\.gate)\.e_score_correction_bias_vl", name)
        if layer:
            homes[f"{layer[1]}.bias_vl"] = Home(name, parameter, experts)
    return homes


def load_weights(model: Any, stock: Callable[[Weights], set[str]], weights: Weights) -> set[str]:
    """Load a stream of checkpoint tensors; returns the names of all parameters loaded.

    `stock` is vLLM's own `load_weights`, bound. At most one tensor is held at a time. Raises
    WeightsError naming the tensor. Missing tensors are an error on the first load only: later
    ones may be partial updates.
    """
    homes = find_homes(model)
    loaded: set[str] = set(getattr(model, "vision_tensors_loaded", ()))
    dropped: dict[str, list[str]] = {}

    def rest() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            home = homes.get(name)
            if home is not None:
                _load(name, tensor, home)
                loaded.add(name)
            elif reason := _why_dropped(name, model):
                dropped.setdefault(reason, []).append(name)
            elif _VISION_SIDE.match(name):
                raise WeightsError(f"checkpoint tensor {name} has no home in this model")
            else:
                yield name, tensor

    names = set(stock(rest()))
    for reason, which in dropped.items():
        logger.info("[vision-exp] %d tensors not loaded (%s): %s", len(which), reason, _some(which))
    missing = homes.keys() - loaded
    if missing and not hasattr(model, "vision_tensors_loaded"):
        raise WeightsError(f"the checkpoint lacks {len(missing)} tensors: {_some(missing)}")
    model.vision_tensors_loaded = frozenset(loaded)
    return names | {homes[name].parameter_name for name in loaded}


def _load(name: str, tensor: torch.Tensor, home: Home) -> None:
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    if tuple(tensor.shape) != home.shape:
        raise WeightsError(f"{name} has shape {tuple(tensor.shape)}, expected {home.shape}")
    if tensor.dtype not in _DTYPES:
        raise WeightsError(f"{name} has dtype {tensor.dtype}, expected one of {_DTYPES}")
    loader = getattr(home.parameter, "weight_loader", default_weight_loader)
    loader(home.parameter, tensor)


def _why_dropped(name: str, model: Any) -> str | None:
    """The listed reason for not loading a tensor of this name here, or None."""
    if model.no_tower is not None and _TOWER.match(name):
        return model.no_tower
    if (bias := _BIAS.match(name)) and int(bias[1]) < model.config.num_hash_layers:
        return "hash layers route without a bias"
    if bias := _BIAS_VL.match(name):
        layers = model.model.layers
        layer = int(bias[1])
        if layer < len(layers) and not hasattr(layers[layer], "ffn"):
            return "layer of another pipeline rank"
    return None


def _some(names: Iterable[str], limit: int = 8) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more
