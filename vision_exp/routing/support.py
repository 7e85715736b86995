"""Which configurations can route image tokens; the others are refused at start-up."""

from __future__ import annotations

from typing import Any

from vision_exp.routing.reference import MAX_TOP_K

#: How image tokens choose experts, for the evidence line.
RULE = "bias_vl"


class RoutingUnsupported(RuntimeError):
    """This configuration would route image tokens wrongly; the message names cause and way out."""

    def __init__(self, cause: str, consequence: str, hint: str) -> None:
        super().__init__(f"[vision-exp] {cause}: {consequence}. {hint}")


def has_vision(hf_config: Any) -> bool:
    """True for a Vision-Exp config, a draft's included.

    Unlike config.is_vision_exp it does not read model_type, which vLLM changes for MTP drafts.
    """
    return (
        getattr(hf_config, "vision_n_layers", None) not in (None, 0)
        and getattr(hf_config, "vision_config", None) is None
    )


def check_sizes(moe: Any) -> None:
    """Refuse a `DeepseekV4MoE` whose rule for scores or number of experts is not the model's."""
    if moe.scoring_func != "sqrtsoftplus" or not moe.renormalize:
        raise RoutingUnsupported(
            f"scoring_func={moe.scoring_func!r}, norm_topk_prob={moe.renormalize}",
            "image tokens are routed by normalised sqrtsoftplus scores only",
            "The checkpoint's config.json says sqrtsoftplus and true; undo --hf-overrides",
        )
    if moe.n_activated_experts > MAX_TOP_K:
        raise RoutingUnsupported(
            f"num_experts_per_tok={moe.n_activated_experts}",
            f"image tokens can have at most {MAX_TOP_K} experts",
            "The checkpoint's config.json says 6; undo --hf-overrides",
        )


def check_compilation(moe: Any, model_class: type) -> None:
    """Refuse MegaMoE in a model that torch.compile traces: its selection is fixed at tracing.

    That is 0.22 alone. The fused experts select inside an opaque operator, which is not traced.
    """
    traced = any(base.__name__.startswith("TorchCompile") for base in model_class.__mro__)
    if moe.use_mega_moe and traced:
        raise RoutingUnsupported(
            f"{moe.prefix} is compiled, and MegaMoE selects experts in compiled code",
            "image tokens would be routed as text",
            "Choose another --moe-backend",
        )


def check_router(moe: Any, router: Any) -> None:
    """Refuse a layer whose experts are selected by anything but vLLM's biased top-k."""
    fused_shared = getattr(router, "num_fused_shared_experts", 0)
    if type(router).__name__ == "FusedTopKBiasRouter" and not fused_shared:
        return
    raise RoutingUnsupported(
        f"the experts of {moe.prefix} are selected by {type(router).__name__}"
        f" with {fused_shared} fused shared experts",
        "its selection cannot be replaced for image tokens",
        "Unset VLLM_MOE_ROUTING_SIMULATION_STRATEGY and switch shared-expert fusion off (on ROCm: "
        "unset VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS)",
    )


def check_kernel(moe: Any) -> None:
    """Refuse an expert kernel that selects experts inside, as soon as vLLM has chosen it."""
    if _runner(moe)._quant_method.is_monolithic:
        raise RoutingUnsupported(
            f"the expert kernel of {moe.prefix} selects experts itself",
            "it knows no bias_vl and would route image tokens as text",
            "Choose a modular kernel with --moe-backend, for example marlin, or triton_unfused "
            "on ROCm",
        )


def _runner(moe: Any) -> Any:
    experts = getattr(moe.experts, "base_layer", moe.experts)  # LoRA wraps the experts
    return getattr(experts, "runner", experts)  # before 0.24 the runner is inside them


def check_layer(moe: Any) -> None:
    """Refuse a loaded layer whose experts run without the selection, or on other ranks' rows."""
    if moe.use_mega_moe:
        return
    check_kernel(moe)
    runner = _runner(moe)
    if runner.do_naive_dispatch_combine:
        raise RoutingUnsupported(
            f"{moe.prefix} gathers hidden states from other ranks without their token ids",
            "image tokens could not be told from text",
            "Choose another --all2all-backend or --moe-backend, or do without data parallelism",
        )
    if runner.moe_config.pcp_size > 1:
        raise RoutingUnsupported(
            f"{moe.prefix} shares its rows with other prefill-context-parallel ranks",
            "image tokens of other ranks could not be told from text",
            "Set the prefill context parallel size to 1",
        )


def check_v2_runner(vllm_config: Any) -> None:
    """Refuse pipeline parallelism under the V2 runner: later ranks get no token ids there."""
    ranks = vllm_config.parallel_config.pipeline_parallel_size
    if ranks > 1 and has_vision(vllm_config.model_config.hf_config):
        raise RoutingUnsupported(
            f"pipeline_parallel_size={ranks} with vLLM's V2 model runner",
            "later ranks get no token ids and would route image tokens as text",
            "Use VLLM_USE_V2_MODEL_RUNNER=0, or tensor parallelism instead",
        )


def refuse_embeddings(keywords: Any) -> None:
    """Answer the V1 proposer's probe of a draft's `embed_input_ids(**keywords)` with a TypeError.

    It probes whether the draft merges image embeddings, and stops handing it token ids if so. These
    drafts do not merge any; a TypeError is the answer that vLLM itself gives.
    """
    if "multimodal_embeddings" in keywords and "is_multimodal" not in keywords:
        raise TypeError("this draft takes no multimodal embeddings")
