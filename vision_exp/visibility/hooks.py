"""Inside one image every token sees every other, in the sliding-window branch of every prefill.

The metadata builder of the sliding window knows the batch: its wrapper adds `ImageVisibility` to
the metadata of a step that prefills an image, from the spans of the step (engine/context.py). The
attention classes' wrappers (flashmla.py, sm120.py, flashinfer.py) read it. A batch without an image
in prefill has none: stock buffers, widths and kernels. Compressor, indexer and top-k stay causal
always, and so do decode rows.

An image's keys are at hand when its rows run: the layer inserts all of the chunk's rows into the
cache before it attends, and `engine.scheduling` has the whole image in one chunk, whose window
blocks (from chunk start - window + 1 on) are freed at a later chunk's start at the earliest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from vision_exp import patching
from vision_exp.config import is_vision_exp
from vision_exp.engine import context
from vision_exp.visibility import flashinfer, sm120, spans, support
from vision_exp.visibility.support import has_attr

# What this room needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.config.parallel:ParallelConfig.{decode_context_parallel_size, "
    "prefill_context_parallel_size, use_ubatching}",
    "vllm.models.deepseek_v4.amd.rocm:"
    "DeepseekV4ROCMAiterMLAAttention._forward_prefill(swa_metadata) since 0.24 optional",
    "vllm.models.deepseek_v4.amd.rocm:DeepseekV4ROCMAiterSparseSWAMetadataBuilder.build since 0.24 "
    "optional",
    "vllm.models.deepseek_v4.amd.rocm:combine_topk_swa_indices since 0.24 optional",
    "vllm.models.deepseek_v4.attention:DeepseekV4Attention.{attn_sink, compress_ratio, scale, "
    "topk_indices_buffer} since 0.24",
    "vllm.models.deepseek_v4.common.ops.cache_utils:{combine_topk_swa_indices(topk_indices, "
    "query_start_loc, seq_lens, gather_lens, window_size, compress_ratio, topk, M, N), "
    "compute_global_topk_indices_and_lens(topk_indices, token_to_req_indices, block_table, "
    "block_size, is_valid_token)} since 0.24",
    "vllm.models.deepseek_v4.nvidia.b12x:DeepseekV4B12xAttention.{"
    "_forward_prefill(swa_metadata), _reserve_profile_workspace(q)} since 0.24 optional",
    "vllm.models.deepseek_v4.nvidia.b12x:DeepseekV4B12xMLAAttention.{"
    "_forward_b12x_prefill(swa_metadata), _forward_prefill(swa_metadata), "
    "_reserve_dummy_compressed_mla_scratch(q)} since 0.24 optional",
    "vllm.models.deepseek_v4.nvidia.flashinfer_sparse:DeepseekV4FlashInferMLAAttention._forward(q, "
    "kv_cache, swa_k_cache, swa_metadata, attn_metadata, output) since 0.24 optional",
    "vllm.models.deepseek_v4.nvidia.flashinfer_sparse:DeepseekV4FlashInferSM120Attention.{"
    "_as_sparse_cache, _forward_prefill(q, compressed_k_cache, swa_k_cache, output, attn_metadata, "
    "swa_metadata), _get_workspace, _prepare_query(q, output), get_padded_num_q_heads} since 0.24 "
    "optional",
    "vllm.models.deepseek_v4.nvidia.flashinfer_sparse:{compute_global_topk_indices_and_lens, "
    "flashinfer_trtllm_batch_decode_sparse_mla_dsv4} since 0.24",
    "vllm.models.deepseek_v4.nvidia.flashmla:"
    "DeepseekV4FlashMLAAttention._forward_prefill(swa_metadata) since 0.24",
    "vllm.models.deepseek_v4.nvidia.flashmla:combine_topk_swa_indices since 0.24",
    "vllm.models.deepseek_v4.nvidia.model:_select_dsv4_attn_cls(vllm_config) since 0.24",
    "vllm.models.deepseek_v4.sparse_mla:DeepseekV4FlashMLAMetadata.{block_size, block_table, "
    "c128a_prefill_topk_indices} since 0.24",
    "vllm.platforms.interface:Platform.{is_cuda, is_rocm}",
    "vllm.platforms:current_platform",
    "vllm.triton_utils:{tl, triton}",
    "vllm.v1.attention.backend:AttentionMetadataBuilder.vllm_config",
    "vllm.v1.attention.backends.mla.sparse_swa:DeepseekSparseSWAMetadata.{num_decodes, "
    "num_prefills, num_prefill_tokens, seq_lens, block_size, block_table, is_valid_token, "
    "num_decode_tokens, token_to_req_indices}",
    "vllm.v1.attention.backends.mla.sparse_swa:DeepseekSparseSWAMetadata.{prefill_query_lens_cpu, "
    "prefill_seq_lens_cpu, prefill_swa_indices} since 0.24",
    "vllm.v1.attention.backends.mla.sparse_swa:DeepseekSparseSWAMetadataBuilder.{__init__, build, "
    "window_size}",
    "vllm.v1.attention.ops.flashmla:{flash_mla_sparse_fwd, is_flashmla_sparse_supported}",
    "vllm.v1.attention.backends.mla.compressor_utils:"
    "get_dspark_swa_index_width(window_size, num_speculative_tokens) since 0.28",
    "vllm.v1.worker.gpu.input_batch:InputBatch.req_ids",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_attn(input_batch)",
    "vllm.v1.worker.gpu_input_batch:InputBatch.req_ids",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.{_build_attention_metadata, input_batch}",
)


def install() -> None:
    """Wrap runners, metadata builder and attention classes, now or when vLLM imports them."""
    patching.when_imported("vllm.v1.worker.gpu_model_runner", _wrap_runner_v1)
    patching.when_imported("vllm.v1.worker.gpu.model_runner", _wrap_runner_v2)
    patching.when_imported("vllm.v1.attention.backends.mla.sparse_swa", _wrap_builder)
    patching.when_imported("vllm.models.deepseek_v4.amd.rocm", _wrap_rocm)
    patching.when_imported("vllm.models.deepseek_v4.nvidia.flashmla", _wrap_flashmla)
    patching.when_imported("vllm.models.deepseek_v4.nvidia.flashinfer_sparse", _wrap_flashinfer)
    patching.when_imported("vllm.models.deepseek_v4.nvidia.b12x", _wrap_b12x)


# --- the order of requests in the batch, which metadata does not carry ----------------------------
# The target publishes it; the draft keeps it. Releases without one of the functions below are found
# by support.missing_hooks and described; importing them works.


def _publish_order(request_ids: Sequence[str]) -> None:
    if context.current().spans:
        context.publish(request_ids=tuple(request_ids))


def _wrap_runner_v1(module: ModuleType) -> None:
    if has_attr(module, "GPUModelRunner._build_attention_metadata"):
        patching.wrap(module.GPUModelRunner, "_build_attention_metadata", _order_v1)


def _order_v1(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    _publish_order(runner.input_batch.req_ids)
    return original(runner, *args, **kwargs)


def _wrap_runner_v2(module: ModuleType) -> None:
    if has_attr(module, "GPUModelRunner.prepare_attn"):
        patching.wrap(module.GPUModelRunner, "prepare_attn", _order_v2)


def _order_v2(
    original: Callable[..., Any], runner: Any, input_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    _publish_order(input_batch.req_ids)
    return original(runner, input_batch, *args, **kwargs)


# --- metadata -------------------------------------------------------------------------------------


def _wrap_builder(module: ModuleType) -> None:
    builder = module.DeepseekSparseSWAMetadataBuilder
    patching.wrap(builder, "__init__", _builder_init)
    patching.wrap(builder, "build", _builder_build)


def _builder_init(original: Callable[..., Any], builder: Any, *args: Any, **kwargs: Any) -> None:
    original(builder, *args, **kwargs)
    config = builder.vllm_config
    builder._vision_exp_tokens = 0
    hf_config = config.model_config.hf_config
    if is_vision_exp(hf_config) and support.describe(config) == support.BIDIRECTIONAL:
        builder._vision_exp_tokens = hf_config.vision_max_n_token


def _builder_build(original: Callable[..., Any], builder: Any, *args: Any, **kwargs: Any) -> Any:
    metadata = original(builder, *args, **kwargs)
    if context.current().spans and _builder_build_rocm not in patching.wrappers(
        type(builder), "build"
    ):
        _attach_visibility(builder, metadata)
    return metadata


def _builder_build_rocm(
    original: Callable[..., Any], builder: Any, *args: Any, **kwargs: Any
) -> Any:
    # ROCm's builder copies all attributes of the base's metadata into a class of its own.
    metadata = original(builder, *args, **kwargs)
    _attach_visibility(builder, metadata)
    return metadata


def _attach_visibility(builder: Any, metadata: Any) -> None:
    step, tokens = context.current(), builder._vision_exp_tokens
    if not (step.spans and tokens and metadata.num_prefill_tokens):
        return
    if not step.request_ids:
        raise RuntimeError("[vision-exp] a batch with images was built in an unknown order")
    found = spans.image_visibility(
        metadata, step.spans, step.request_ids, builder.window_size, tokens
    )
    if found is not None:
        spans.attach(metadata, found)


# --- attention ------------------------------------------------------------------------------------


def _wrap_flashmla(module: ModuleType) -> None:
    if has_attr(module, "DeepseekV4FlashMLAAttention._forward_prefill"):  # from 0.23
        from vision_exp.visibility import flashmla  # imports Triton

        patching.wrap(module.DeepseekV4FlashMLAAttention, "_forward_prefill", _prefill_flashmla)
        patching.wrap(module, "combine_topk_swa_indices", flashmla.combine)


def _wrap_rocm(module: ModuleType) -> None:
    if support.missing_in(module, support.ROCM) is None:
        from vision_exp.visibility import flashmla  # imports Triton

        rocm_builder = module.DeepseekV4ROCMAiterSparseSWAMetadataBuilder
        patching.wrap(rocm_builder, "build", _builder_build_rocm)
        layer = module.DeepseekV4ROCMAiterMLAAttention
        patching.wrap(layer, "_forward_prefill", _prefill_flashmla)  # gathers keys as FlashMLA's
        patching.wrap(module, "combine_topk_swa_indices", flashmla.combine)


def _prefill_flashmla(
    original: Callable[..., Any], layer: Any, *args: Any, swa_metadata: Any, **kwargs: Any
) -> Any:
    found = spans.get(swa_metadata)
    if found is None:
        return original(layer, *args, swa_metadata=swa_metadata, **kwargs)
    from vision_exp.visibility import flashmla

    with context.during(prefill=flashmla.PrefillCursor(found)):
        output = original(layer, *args, swa_metadata=swa_metadata, **kwargs)
        if context.current().prefill.row:  # its index rows went through `combine`
            _note(layer)
    return output


def _note(layer: Any) -> None:
    seen = context.current().seen
    if seen is not None:
        seen.attended.add(id(layer))


def _wrap_flashinfer(module: ModuleType) -> None:
    if has_attr(module, "DeepseekV4FlashInferSM120Attention._forward_prefill"):  # from 0.24
        sm120 = module.DeepseekV4FlashInferSM120Attention
        patching.wrap(sm120, "_forward_prefill", _prefill_sm120)
    if has_attr(module, "DeepseekV4FlashInferMLAAttention._forward"):
        patching.wrap(module.DeepseekV4FlashInferMLAAttention, "_forward", _forward_sm100)


def _prefill_sm120(original: Callable[..., Any], layer: Any, **kwargs: Any) -> None:
    original(layer, **kwargs)
    found = spans.get(kwargs["swa_metadata"])
    if found is not None:
        sm120.attend_sm120(layer, found, **kwargs)
        _note(layer)


def _forward_sm100(original: Callable[..., Any], layer: Any, **kwargs: Any) -> None:
    original(layer, **kwargs)
    found = spans.get(kwargs["swa_metadata"])
    if found is not None:
        flashinfer.attend_sm100(layer, found, **kwargs)
        _note(layer)


def _wrap_b12x(module: ModuleType) -> None:
    if support.b12x_reason("DeepseekV4B12xMLAAttention", module) is None:
        early = module.DeepseekV4B12xMLAAttention
        if support.b12x_prefill(early) == "_forward_b12x_prefill":
            patching.wrap(early, "_forward_b12x_prefill", _prefill_b12x)
        else:
            patching.wrap(early, "_forward_prefill", _prefill_b12x)
        patching.wrap(early, "_reserve_dummy_compressed_mla_scratch", _reserve_b12x)
    if support.b12x_reason("DeepseekV4B12xAttention", module) is None:
        late = module.DeepseekV4B12xAttention
        patching.wrap(late, "_forward_prefill", _prefill_b12x)
        patching.wrap(late, "_reserve_profile_workspace", _reserve_b12x)


def _prefill_b12x(
    original: Callable[..., Any], layer: Any, *args: Any, swa_metadata: Any, **kwargs: Any
) -> Any:
    found = spans.get(swa_metadata)
    if found is not None:
        from vision_exp.visibility import b12x

        swa_metadata = b12x.widened(found, swa_metadata)
        _note(layer)
    return original(layer, *args, swa_metadata=swa_metadata, **kwargs)


def _reserve_b12x(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> None:
    if is_vision_exp(layer.vllm_config.model_config.hf_config):
        from vision_exp.visibility import b12x

        for wide in b12x.wide_layers(layer):
            original(wide, *args, **kwargs)
    else:
        original(layer, *args, **kwargs)
