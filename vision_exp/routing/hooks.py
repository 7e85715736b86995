"""Applies `bias_vl` in every MoE layer of a Vision-Exp model, its DSpark draft and its MTP draft.

A step without image rows takes vLLM's own router, untouched. In a step with image rows, known on
the host (step.py), every layer's selection is `routing.mm_topk`, with the image mask made from
the token ids that the layer itself receives: they are cut and padded together with its rows, also
under sequence parallelism. Where a layer cannot have the ids of its rows, start-up is refused.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from vision_exp import layout, patching
from vision_exp.engine import step
from vision_exp.routing import support
from vision_exp.routing.topk import MANY_ROWS, mm_topk

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.models.deepseek_v4.nvidia.model:fused_topk_bias",
    "vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router:"
    "fused_topk_bias(gating_output, input_tokens, indices_type)",
    "vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router:FusedTopKBiasRouter."
    "_compute_routing(hidden_states, router_logits, indices_type, input_ids)",
    "vllm.models.deepseek_v4.nvidia.model:DeepseekV4Model",
    "vllm.models.deepseek_v4.nvidia.model:DeepseekV4MoE.__init__(vllm_config)",
    "vllm.models.deepseek_v4.nvidia.model:DeepseekV4MoE.forward(hidden_states, input_ids)",
    "vllm.models.deepseek_v4.nvidia.model:DeepseekV4MoE.experts",
    "vllm.models.deepseek_v4.nvidia.model:DeepseekV4MoE.gate",
    "vllm.models.deepseek_v4.nvidia.model:DeepseekV4MoE.hash_indices_dtype",
    "vllm.models.deepseek_v4.nvidia.model:DeepseekV4MoE.n_activated_experts",
    "vllm.models.deepseek_v4.nvidia.model:DeepseekV4MoE.n_routed_experts",
    "vllm.models.deepseek_v4.nvidia.model:DeepseekV4MoE.prefix",
    "vllm.models.deepseek_v4.nvidia.model:DeepseekV4MoE.routed_scaling_factor",
    "vllm.models.deepseek_v4.nvidia.model:DeepseekV4MoE.use_mega_moe",
    "vllm.models.deepseek_v4.nvidia.mtp:DeepSeekV4MTP.embed_input_ids(input_ids)",
    "vllm.models.deepseek_v4.nvidia.mtp:DeepSeekV4MultiTokenPredictorLayer.forward(input_ids)",
    "vllm.models.deepseek_v4.nvidia.mtp:DeepSeekV4MultiTokenPredictorLayer.mtp_block",
    "vllm.models.deepseek_v4.nvidia.mtp:sp_shard since 0.27",
    "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner.router"
    " | vllm.model_executor.layers.fused_moe.layer:FusedMoE.router",
    "vllm.models.deepseek_v4.nvidia.model:DeepseekV4DecoderLayer.ffn",
    "vllm.models.deepseek_v4.nvidia.model:DeepseekV4DecoderLayer.forward(input_ids)",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.load_model",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.load_model",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.vllm_config",
)

BIAS_VL = "e_score_correction_bias_vl"


class MissingTokenIds(RuntimeError):
    """Image rows reached a layer without the token ids that tell them from text rows."""


_layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
# (step, token ids, mask) of the latest mask; a forward pass hands one ids tensor to all its layers.
_last_mask: tuple[step.StepImages, torch.Tensor, torch.Tensor] | None = None
_mega = threading.local()  # .moe: the MegaMoE layer that runs in this thread, if any


def install() -> None:
    """Once a runner has loaded its models, check every routed layer and compile the kernel."""
    patching.when_imported("vllm.v1.worker.gpu_model_runner", _wrap_runner_v1)
    patching.when_imported("vllm.v1.worker.gpu.model_runner", _wrap_runner_v2)


def install_model(namespace: dict[str, Any]) -> None:
    """Wrap `DeepseekV4MoE` and the MegaMoE selection in vLLM's patched nvidia/model.py."""
    moe = namespace["DeepseekV4MoE"]
    patching.wrap(moe, "__init__", partial(_moe_init, namespace))
    patching.wrap(moe, "forward", _moe_forward)
    patching.wrap(sys.modules[namespace["__name__"]], "fused_topk_bias", _mega_topk)


def install_draft(site: str, namespace: dict[str, Any]) -> None:
    """Hand token ids on inside the MTP draft, which drops them; DSpark hands them on itself."""
    if site == "mtp":
        patching.wrap(namespace["DeepSeekV4MTP"], "embed_input_ids", _mtp_embed_input_ids)
        layer = namespace["DeepSeekV4MultiTokenPredictorLayer"]
        patching.wrap(layer, "forward", partial(_mtp_forward, namespace))


def describe(vllm_config: Any) -> str:
    """How image tokens choose experts, for the evidence line."""
    return "bias_vl"


# --- layers ---------------------------------------------------------------------------------------


def _moe_init(
    namespace: dict[str, Any],
    original: Callable[..., None],
    self: Any,
    vllm_config: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    original(self, vllm_config, *args, **kwargs)
    config = vllm_config.model_config.hf_config
    if not support.has_vision(config):
        return
    support.check_sizes(self)
    support.check_compilation(self, namespace["DeepseekV4Model"])
    bias = nn.Parameter(
        torch.empty(self.n_routed_experts, dtype=torch.float32), requires_grad=False
    )
    self.gate.register_parameter(BIAS_VL, bias)
    if not self.use_mega_moe:
        _wrap_router(self)
    _layers.add(self)


def _wrap_router(moe: Any) -> None:
    router = moe.experts.router
    support.check_router(moe, router)
    router._compute_routing = partial(_compute_routing, router._compute_routing, moe)


def _moe_forward(
    original: Callable[..., torch.Tensor],
    self: Any,
    hidden_states: torch.Tensor,
    input_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    if not _mixed(self):
        return original(self, hidden_states, input_ids)
    support.check_layer(self)
    _ids_of_rows(self, hidden_states, input_ids)
    if not self.use_mega_moe:
        return original(self, hidden_states, input_ids)
    _mega.moe = self
    try:
        return original(self, hidden_states, input_ids)
    finally:
        _mega.moe = None


def _mixed(moe: Any) -> bool:
    """True if `moe` must tell image rows from text rows in the forward pass now running."""
    return (
        step.current().has_image_rows
        and getattr(moe.gate, BIAS_VL, None) is not None
        and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
    )


def _ids_of_rows(moe: Any, rows: torch.Tensor, input_ids: torch.Tensor | None) -> torch.Tensor:
    """`input_ids` if there is one for each of `rows`, else MissingTokenIds."""
    if input_ids is None:
        raise MissingTokenIds(f"[vision-exp] {moe.prefix} got image rows without token ids")
    if input_ids.shape != rows.shape[:1]:
        raise MissingTokenIds(
            f"[vision-exp] {moe.prefix} got {rows.shape[0]} rows with {input_ids.shape[0]} ids"
        )
    return input_ids


def _image_mask(input_ids: torch.Tensor) -> torch.Tensor:
    """Which rows are image rows; made once for all layers of a forward pass."""
    global _last_mask
    images, last = step.current(), _last_mask
    if last is None or last[0] is not images or last[1] is not input_ids:
        _last_mask = last = (images, input_ids, layout.image_token_mask(input_ids))
    return last[2]


def _compute_routing(
    original: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    moe: Any,
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    indices_type: torch.dtype | None,
    *,
    input_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not _mixed(moe):
        return original(hidden_states, router_logits, indices_type, input_ids=input_ids)
    return _route(moe, router_logits, input_ids, indices_type)


def _mega_topk(
    original: Callable[..., tuple[torch.Tensor, torch.Tensor]], *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    moe = getattr(_mega, "moe", None)
    if moe is None:
        return original(*args, **kwargs)
    return _route(moe, kwargs["gating_output"], kwargs["input_tokens"], kwargs.get("indices_type"))


def _route(
    moe: Any,
    logits: torch.Tensor,
    input_ids: torch.Tensor | None,
    indices_type: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    token_ids = _ids_of_rows(moe, logits, input_ids)
    wanted = indices_type or torch.int32
    weights, ids = mm_topk(
        logits,
        moe.gate.e_score_correction_bias,
        getattr(moe.gate, BIAS_VL),
        _image_mask(token_ids),
        top_k=moe.n_activated_experts,
        scale=moe.routed_scaling_factor,
        tid2eid=moe.gate.tid2eid,
        token_ids=token_ids,
        ids_dtype=torch.int64 if wanted == torch.int64 else torch.int32,
    )
    return weights, ids.to(wanted)


def warm_up(layers: Iterable[Any]) -> None:
    """Route in a layer of each kind, few rows and many: compiles before the first request."""
    kinds = {(moe.gate.tid2eid is not None, moe.use_mega_moe): moe for moe in layers}
    for moe, rows in itertools.product(kinds.values(), (1, MANY_ROWS)):
        device = getattr(moe.gate, BIAS_VL).device
        logits = torch.zeros(rows, moe.n_routed_experts, device=device)
        token_ids = torch.zeros(rows, dtype=moe.hash_indices_dtype, device=device)
        _route(moe, logits, token_ids, moe.hash_indices_dtype)


# --- the MTP draft --------------------------------------------------------------------------------


def _mtp_forward(
    namespace: dict[str, Any],
    original: Callable[..., torch.Tensor],
    self: Any,
    input_ids: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    block = self.mtp_block
    if not _mixed(block.ffn):
        return original(self, input_ids, *args, **kwargs)
    if input_ids is not None and getattr(block, "use_sequence_parallel", False):
        input_ids_of_rows = namespace["sp_shard"](input_ids)
    else:
        input_ids_of_rows = input_ids

    def put_ids(module: nn.Module, values: tuple, keywords: dict) -> tuple[tuple, dict]:
        return values, {**keywords, "input_ids": input_ids_of_rows}

    handle = block.register_forward_pre_hook(put_ids, with_kwargs=True)
    try:
        return original(self, input_ids, *args, **kwargs)
    finally:
        handle.remove()


def _mtp_embed_input_ids(
    original: Callable[..., torch.Tensor], self: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    # The V1 proposer probes whether the draft merges image embeddings, and stops handing it token
    # ids if so. This draft does not merge any; a TypeError is the answer that vLLM itself gives.
    if "multimodal_embeddings" in kwargs and "is_multimodal" not in kwargs:
        raise TypeError("this draft takes no multimodal embeddings")
    return original(self, *args, **kwargs)


# --- start-up -------------------------------------------------------------------------------------


def _wrap_runner_v1(module: Any) -> None:
    patching.wrap(module.GPUModelRunner, "load_model", _load_model)


def _wrap_runner_v2(module: Any) -> None:
    patching.wrap(module.GPUModelRunner, "load_model", _load_model_v2)


def _load_model(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(runner, *args, **kwargs)
    for layer in _layers:
        support.check_layer(layer)
    warm_up(_layers)
    return result


def _load_model_v2(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    support.check_v2_runner(runner.vllm_config)
    return _load_model(original, runner, *args, **kwargs)
