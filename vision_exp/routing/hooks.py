"""Applies `bias_vl` in every MoE layer of a Vision-Exp model and of its DSpark and MTP drafts."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from vision_exp import patching
from vision_exp.engine import context
from vision_exp.routing import select, support

# What this room needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.config.parallel:ParallelConfig.pipeline_parallel_size",
    "vllm.model_executor.layers.fused_moe.config:FusedMoEConfig.pcp_size",
    "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase.is_monolithic",
    "vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router:"
    "FusedTopKBiasRouter._compute_routing(hidden_states, router_logits, indices_type, input_ids)",
    "vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router:{"
    "fused_topk_bias(gating_output, input_tokens, indices_type), FusedTopKBiasRouter}",
    "vllm.model_executor.layers.fused_moe.runner.moe_runner:"
    "MoERunner.router | vllm.model_executor.layers.fused_moe.layer:FusedMoE.router",
    "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner.{_quant_method, "
    "do_naive_dispatch_combine, moe_config}",
    "vllm.models.deepseek_v4.amd.model:DeepseekV4DecoderLayer.{ffn, forward(input_ids)}",
    "vllm.models.deepseek_v4.amd.model:DeepseekV4MoE.{__init__(vllm_config), "
    "forward(hidden_states, input_ids), experts, gate, hash_indices_dtype, n_activated_experts, "
    "n_routed_experts, prefix, routed_scaling_factor, scoring_func, renormalize}",
    "vllm.models.deepseek_v4.amd.model:DeepseekV4Model",
    "vllm.models.deepseek_v4.amd.mtp:DeepSeekV4MultiTokenPredictorLayer.{forward(input_ids), "
    "mtp_block}",
    "vllm.models.deepseek_v4.nvidia.model:DeepseekV4DecoderLayer.{ffn, forward(input_ids)}",
    "vllm.models.deepseek_v4.nvidia.model:DeepseekV4MoE.{__init__(vllm_config), "
    "forward(hidden_states, input_ids), experts, gate, hash_indices_dtype, n_activated_experts, "
    "n_routed_experts, prefix, routed_scaling_factor, use_mega_moe, scoring_func, renormalize}",
    "vllm.models.deepseek_v4.nvidia.model:{fused_topk_bias, DeepseekV4Model}",
    "vllm.models.deepseek_v4.nvidia.mtp:DeepSeekV4MultiTokenPredictorLayer.{forward(input_ids), "
    "mtp_block}",
    "vllm.models.deepseek_v4.nvidia.mtp:sp_shard since 0.27",
    "vllm.platforms.interface:Platform.is_rocm",
    "vllm.platforms:current_platform",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.{load_model, vllm_config}",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.load_model",
)

_layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # every routed layer of this process


def install() -> None:
    """Once a runner has loaded its models, check every routed layer and compile the kernel."""
    patching.when_imported("vllm.v1.worker.gpu_model_runner", _wrap_runner)
    patching.when_imported("vllm.v1.worker.gpu.model_runner", _wrap_runner_v2)


def install_model(namespace: dict[str, Any]) -> None:
    """Wrap `DeepseekV4MoE`, and the MegaMoE selection where there is one, in vLLM's model.py."""
    moe = namespace["DeepseekV4MoE"]
    patching.wrap(moe, "__init__", partial(_moe_init, namespace))
    patching.wrap(moe, "forward", _moe_forward)
    if "fused_topk_bias" in namespace:  # amd/ has no MegaMoE
        patching.wrap(sys.modules[namespace["__name__"]], "fused_topk_bias", _mega_topk)


def install_draft(site: str, namespace: dict[str, Any]) -> None:
    """Hand token ids on inside the MTP draft, which drops them; DSpark hands them on itself."""
    if site == "mtp":
        layer = namespace["DeepSeekV4MultiTokenPredictorLayer"]
        patching.wrap(layer, "forward", partial(_mtp_forward, namespace))


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
    if not hasattr(self, "use_mega_moe"):  # amd/
        self.use_mega_moe = False
    support.check_sizes(self)
    support.check_compilation(self, namespace["DeepseekV4Model"])
    bias = nn.Parameter(
        torch.empty(self.n_routed_experts, dtype=torch.float32), requires_grad=False
    )
    self.gate.register_parameter(select.BIAS_VL, bias)
    if not self.use_mega_moe:
        _wrap_router(self)
    _layers.add(self)


def _wrap_router(moe: Any) -> None:
    from vllm.platforms import current_platform

    router = moe.experts.router
    support.check_router(moe, router)
    support.check_kernel(moe)
    routing = _compute_routing_rocm if current_platform.is_rocm() else _compute_routing
    router._compute_routing = partial(routing, router._compute_routing, moe)


def _moe_forward(
    original: Callable[..., torch.Tensor],
    self: Any,
    hidden_states: torch.Tensor,
    input_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    if not select.is_mixed(self):
        return original(self, hidden_states, input_ids)
    support.check_layer(self)
    select.check_ids(self, hidden_states, input_ids)
    select.note_entry(self)
    if not self.use_mega_moe:
        return original(self, hidden_states, input_ids)
    with context.during(mega_moe=self):
        return original(self, hidden_states, input_ids)


def _compute_routing(
    original: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    moe: Any,
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    indices_type: torch.dtype | None,
    *,
    input_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not select.is_mixed(moe):
        return original(hidden_states, router_logits, indices_type, input_ids=input_ids)
    return select.route(moe, router_logits, input_ids, indices_type)


def _compute_routing_rocm(
    original: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    moe: Any,
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    indices_type: torch.dtype | None,
    *,
    input_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    # vLLM's operators there may break ties of scores by another rule than `mm_topk`, so text rows
    # keep what they chose.
    stock = original(hidden_states, router_logits, indices_type, input_ids=input_ids)
    if not select.is_mixed(moe):
        return stock
    return select.replace_image_rows(moe, router_logits, input_ids, stock)


def _mega_topk(
    original: Callable[..., tuple[torch.Tensor, torch.Tensor]], *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    layer = context.current().mega_moe
    if layer is None:
        return original(*args, **kwargs)
    logits, input_ids = kwargs["gating_output"], kwargs["input_tokens"]
    return select.route(layer, logits, input_ids, kwargs.get("indices_type"))


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
    if not select.is_mixed(block.ffn):
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


# --- start-up -------------------------------------------------------------------------------------


def _wrap_runner(module: ModuleType) -> None:
    patching.wrap(module.GPUModelRunner, "load_model", _load_model)


def _wrap_runner_v2(module: ModuleType) -> None:
    patching.wrap(module.GPUModelRunner, "load_model", _load_model_v2)


def _load_model(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(runner, *args, **kwargs)
    for layer in _layers:
        support.check_layer(layer)
    select.warm_up(_layers)
    return result


def _load_model_v2(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    support.check_v2_runner(runner.vllm_config)
    return _load_model(original, runner, *args, **kwargs)
