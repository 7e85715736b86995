"""Where the tensors go that a Vision-Exp checkpoint has beyond a text-only one.

| tensors | parameter |
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

from vision_exp.config import VisionConfig, read_config

Weights = Iterable[tuple[str, torch.Tensor]]

logger = logging.getLogger("vllm.vision_exp")

_TOWER = re.compile(r"(vision|aligner)\.|image_(start|end|newline|pad)$")
_BIAS_VL = re.compile(r"layers\.(\d+)\.ffn\.gate\.bias_vl$")
_BIAS = re.compile(r"layers\.(\d+)\.ffn\.gate\.bias$")
_VISION_SIDE = re.compile(r"vision|aligner|image_|layers\..*_vl$")
# Published in bfloat16 (tower) and float32 (biases); each converts to the parameter's own.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class WeightsError(RuntimeError):
    """A tensor without a parameter, a parameter without a tensor, or a wrong shape or dtype."""


@dataclass(frozen=True)
class TargetParameter:
    """The parameter that one checkpoint tensor goes to, and the shape that the whole tensor has."""

    name: str
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


def map_targets(model: Any) -> dict[str, TargetParameter]:
    """Checkpoint name -> target parameter, for what this rank holds.

    Raises WeightsError if the built modules have a parameter that no checkpoint tensor fills, or
    lack one.
    """
    parameters = dict(model.named_parameters())
    targets: dict[str, TargetParameter] = {}
    if model.tower_disabled_reason is None:
        built = {name for name in parameters if _TOWER.match(name)}
        shapes = tower_shapes(read_config(model.config))
        if built != shapes.keys():
            raise WeightsError(f"tower parameters differ: {_some(built ^ shapes.keys())}")
        targets |= {
            name: TargetParameter(name, parameters[name], shape) for name, shape in shapes.items()
        }
    experts = (model.config.n_routed_experts,)
    for name, parameter in parameters.items():
        layer = re.fullmatch(r"model\.(layers\.\d+\.ffn\.gate)\.e_score_correction_bias_vl", name)
        if layer:
            targets[f"{layer[1]}.bias_vl"] = TargetParameter(name, parameter, experts)
    return targets


def load_weights(model: Any, stock: Callable[[Weights], set[str]], weights: Weights) -> set[str]:
    """Load a stream of checkpoint tensors; returns the names of all parameters loaded.

    `stock` is vLLM's own `load_weights`, bound. At most one tensor is held at a time. Raises
    WeightsError naming the tensor. A later load may be of some tensors: what an earlier one
    brought is not missing.
    """
    targets = map_targets(model)
    loaded: set[str] = set(getattr(model, "vision_tensors_loaded", ()))
    dropped: dict[str, list[str]] = {}

    def rest() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            target = targets.get(name)
            if target is not None:
                _load(name, tensor, target)
                loaded.add(name)
            elif reason := _why_dropped(name, model):
                dropped.setdefault(reason, []).append(name)
            elif _VISION_SIDE.match(name):
                raise WeightsError(f"checkpoint tensor {name} has no parameter in this model")
            else:
                yield name, tensor

    names = set(stock(rest()))
    for reason, which in dropped.items():
        logger.info("[vision-exp] %d tensors not loaded (%s): %s", len(which), reason, _some(which))
    missing = targets.keys() - loaded
    if missing:
        raise WeightsError(f"the checkpoint lacks {len(missing)} tensors: {_some(missing)}")
    model.vision_tensors_loaded = frozenset(loaded)
    return names | {targets[name].name for name in loaded}


def _load(name: str, tensor: torch.Tensor, target: TargetParameter) -> None:
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    if tuple(tensor.shape) != target.shape:
        raise WeightsError(f"{name} has shape {tuple(tensor.shape)}, expected {target.shape}")
    if tensor.dtype not in _DTYPES:
        raise WeightsError(f"{name} has dtype {tensor.dtype}, expected one of {_DTYPES}")
    loader = getattr(target.parameter, "weight_loader", default_weight_loader)
    loader(target.parameter, tensor)


def _why_dropped(name: str, model: Any) -> str | None:
    """The listed reason for not loading a tensor of this name here, or None."""
    if model.tower_disabled_reason is not None and _TOWER.match(name):
        return model.tower_disabled_reason
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
