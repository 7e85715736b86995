"""What this installation can do for the visibility of image rows, and why not."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Container
from typing import Any

from vision_exp.settings import REQUIRE_VISIBILITY
from vision_exp.visibility import spans

BIDIRECTIONAL = "bidirectional"
SWA = "vllm.v1.attention.backends.mla.sparse_swa"
FLASHMLA = "vllm.models.deepseek_v4.nvidia.flashmla"
FLASHINFER = "vllm.models.deepseek_v4.nvidia.flashinfer_sparse"
ROCM = "vllm.models.deepseek_v4.amd.rocm"
#: What is wrapped of the attention code of each of vLLM's platforms.
_HOOKS: dict[str, dict[str, tuple[str, ...]]] = {
    "cuda": {
        FLASHMLA: ("DeepseekV4FlashMLAAttention._forward_prefill", "combine_topk_swa_indices"),
        FLASHINFER: (
            "DeepseekV4FlashInferSM120Attention._forward_prefill",
            "DeepseekV4FlashInferMLAAttention._forward",
        ),
    },
    "rocm": {
        ROCM: (
            "DeepseekV4ROCMAiterMLAAttention._forward_prefill",
            "DeepseekV4ROCMAiterSparseSWAMetadataBuilder.build",
            "combine_topk_swa_indices",
        )
    },
}
B12X = "vllm.models.deepseek_v4.nvidia.b12x"  # in forks
#: Its attention class, by fork, and what reserves the kernel's scratch while vLLM profiles.
B12X_RESERVES = {
    "DeepseekV4B12xMLAAttention": "_reserve_dummy_compressed_mla_scratch",
    "DeepseekV4B12xAttention": "_reserve_profile_workspace",
}
_RUNNERS = {
    "vllm.v1.worker.gpu_model_runner": "GPUModelRunner._build_attention_metadata",
    "vllm.v1.worker.gpu.model_runner": "GPUModelRunner.prepare_attn",
}


def describe(vllm_config: Any) -> str:
    """`bidirectional`, or `causal reason=...` for what this installation cannot do.

    Raises RuntimeError instead of the latter under VISION_EXP_REQUIRE_VISIBILITY=1.
    """
    reason = _reason(vllm_config)
    if reason is None:
        return BIDIRECTIONAL
    if REQUIRE_VISIBILITY.is_on():
        raise RuntimeError(
            f"[vision-exp] image tokens would not see each other ({reason}) and "
            f"{REQUIRE_VISIBILITY.name}=1 forbids to start without"
        )
    return f"causal reason={reason}"


def _reason(vllm_config: Any) -> str | None:
    from vllm.platforms import current_platform

    on_rocm = current_platform.is_rocm()
    if not on_rocm and not current_platform.is_cuda():
        return "platform-is-not-cuda-or-rocm"
    parallel = vllm_config.parallel_config
    if getattr(parallel, "use_ubatching", False):
        return "micro-batches-reorder-requests"
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name}-above-1"
    missing = missing_hooks("rocm" if on_rocm else "cuda")
    if missing is not None:
        return f"release-lacks-{missing}"
    if on_rocm:
        return None  # amd/model.py has one attention class
    from vllm.models.deepseek_v4.nvidia import model

    name = model._select_dsv4_attn_cls(vllm_config).__name__
    if name == "DeepseekV4FlashMLAAttention":
        return None
    if name.startswith("DeepseekV4FlashInfer"):
        return flashinfer_reason(name, vllm_config)
    if name in B12X_RESERVES:
        return b12x_reason(name, importlib.import_module(B12X))
    return f"unknown-attention-class-{name}"


def missing_hooks(platform: str) -> str | None:
    """The first function or field that this release's attention code lacks, if any.

    platform: "cuda" or "rocm"; the other's modules may not be importable.
    """
    swa = importlib.import_module(SWA)
    fields = {f.name for f in dataclasses.fields(swa.DeepseekSparseSWAMetadata)}
    for name in ("prefill_swa_indices", "prefill_seq_lens_cpu", "prefill_query_lens_cpu"):
        if name not in fields:
            return name
    for module_name in _HOOKS[platform]:
        lacking = missing_in(importlib.import_module(module_name), module_name)
        if lacking is not None:
            return lacking
    for module_name, name in _RUNNERS.items():
        runner = sys.modules.get(module_name)  # the runner in use has been imported
        if runner is not None and not has_attr(runner, name):
            return name
    return None


def missing_in(module: Any, name: str) -> str | None:
    """The first function that is wrapped in the attention module `name` and that it lacks."""
    wanted = next(hooks[name] for hooks in _HOOKS.values() if name in hooks)
    return next((found for found in wanted if not has_attr(module, found)), None)


def has_attr(module: Any, name: str) -> bool:
    """True if `module` has the dotted `name`."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is not None


def b12x_prefill(found: type) -> str | None:
    """The method by which a fork's b12x class hands its kernel the rows of a prefill.

    Its own: most branches leave the one that is inherited from FlashMLA's class uncalled.
    """
    names = ("_forward_b12x_prefill", "_forward_prefill")
    return next((name for name in names if name in vars(found)), None)


def b12x_reason(class_name: str, module: Any) -> str | None:
    """Why layers of a fork's b12x class cannot widen image rows, or None if they can."""
    found = getattr(module, class_name, None)
    if found is None or b12x_prefill(found) is None:
        return "b12x-attention-lacks-_forward_prefill"
    name = B12X_RESERVES[class_name]
    return None if has_attr(found, name) else f"b12x-attention-lacks-{name}"


def flashinfer_reason(class_name: str, vllm_config: Any) -> str | None:
    """Why layers of this class cannot widen image rows here, or None if they can."""
    hf_config = vllm_config.model_config.hf_config
    width = spans.widest(hf_config.sliding_window, hf_config.vision_max_n_token)
    if class_name == "DeepseekV4FlashInferSM120Attention":
        return sm120_reason(sm120_table(), _sm120_heads(vllm_config), width)
    if class_name == "DeepseekV4FlashInferMLAAttention":
        from vllm.v1.attention.ops.flashmla import is_flashmla_sparse_supported

        supported, _ = is_flashmla_sparse_supported()
        return None if supported else "flashinfer-sm100-window-is-fixed-and-flashmla-is-missing"
    return f"unknown-attention-class-{class_name}"


def _sm120_heads(vllm_config: Any) -> int:
    from vllm.models.deepseek_v4.nvidia.flashinfer_sparse import DeepseekV4FlashInferSM120Attention

    shards = vllm_config.parallel_config.tensor_parallel_size
    heads = vllm_config.model_config.hf_config.num_attention_heads // shards
    padded: int = DeepseekV4FlashInferSM120Attention.get_padded_num_q_heads(heads)
    return padded


def check_drafting(vllm_config: Any) -> None:
    """Refuse DSpark on SM12x where FlashInfer has no kernel for its rows, before weights load.

    Without this, releases up to 0.27 end in a failed check inside FlashInfer after loading.
    """
    from vllm.platforms import current_platform

    drafts = getattr(vllm_config.speculative_config, "method", None) == "dspark"
    if not drafts or not current_platform.is_cuda():
        return
    from vllm.models.deepseek_v4.nvidia import model

    if model._select_dsv4_attn_cls(vllm_config).__name__ != "DeepseekV4FlashInferSM120Attention":
        return
    window = vllm_config.model_config.hf_config.sliding_window
    keys = draft_keys(window, vllm_config.speculative_config.num_speculative_tokens)
    reason = sm120_reason(sm120_table(), _sm120_heads(vllm_config), keys)
    if reason is not None:
        raise RuntimeError(
            f"[vision-exp] DSpark cannot draft on this GPU ({reason}); no weights were loaded. "
            "Use vLLM 0.29.0, install flashinfer-python 0.6.18, or start without "
            "--speculative-config"
        )


def draft_keys(window: int, draft_tokens: int) -> int:
    """Keys of a row of DSpark's draft: window and draft, rounded up as this vLLM does."""
    utils = importlib.import_module("vllm.v1.attention.backends.mla.compressor_utils")
    rounded = getattr(utils, "get_dspark_swa_index_width", None)
    if rounded is None:  # before 0.28, inside the metadata builder
        return -(-(window + draft_tokens) // 128) * 128
    keys: int = rounded(window, draft_tokens)
    return keys


def sm120_table() -> Container[tuple[int, int]] | None:
    """What the installed FlashInfer's SM120 decode kernel takes: (heads, keys) `in` it.

    A set up to 0.6.18, a rule from 0.7 on that cannot be listed; None before 0.6.14.
    """
    try:
        module = importlib.import_module("flashinfer.mla._sparse_mla_sm120")
    except ImportError:
        return None
    table: Container[tuple[int, int]] | None = getattr(module, "_DECODE_DSV4_DISPATCH", None)
    return table


def sm120_reason(table: Container[tuple[int, int]] | None, heads: int, width: int) -> str | None:
    """Why SM120's kernel cannot take rows of `width` keys, or None."""
    if table is None:
        return "flashinfer-has-no-sm120-sparse-mla"
    try:
        known = (heads, width) in table
    except TypeError:
        return f"flashinfer-sm120-kernels-are-unknown-in-a-{type(table).__name__}"
    return None if known else f"flashinfer-sm120-has-no-kernel-for-{heads}-heads-{width}-keys"
