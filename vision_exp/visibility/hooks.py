"""Inside one image every token sees every other, in the sliding-window branch of every prefill.

The metadata builder of the sliding window knows the batch: its wrapper adds `Visible` to the
metadata of a step that prefills an image, from the spans of `vision_exp.engine.step`. The attention
classes' wrappers (`visibility_flashmla`, `visibility_flashinfer`) read it. A batch without an image
in prefill has no `Visible`: stock buffers, widths and kernels. Compressor, indexer and top-k stay
causal always, and so do decode rows.

An image's keys are at hand when its rows run: the layer inserts all of the chunk's rows into the
cache before it attends, and `engine.scheduling` has the whole image in one chunk, whose window
blocks (from chunk start - window + 1 on) are freed at a later chunk's start at the earliest.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vision_exp import patching
from vision_exp.engine import step
from vision_exp.visibility import spans as visibility_rows
from vision_exp.visibility.spans import RowSpan

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.v1.attention.backend:AttentionMetadataBuilder.vllm_config",
    "vllm.v1.attention.backends.mla.sparse_swa:DeepseekSparseSWAMetadataBuilder.__init__",
    "vllm.v1.attention.backends.mla.sparse_swa:DeepseekSparseSWAMetadataBuilder.build",
    "vllm.v1.attention.backends.mla.sparse_swa:DeepseekSparseSWAMetadataBuilder.window_size",
    "vllm.v1.attention.backends.mla.sparse_swa:DeepseekSparseSWAMetadata.num_decodes",
    "vllm.v1.attention.backends.mla.sparse_swa:DeepseekSparseSWAMetadata.num_prefills",
    "vllm.v1.attention.backends.mla.sparse_swa:DeepseekSparseSWAMetadata.num_prefill_tokens",
    "vllm.v1.attention.backends.mla.sparse_swa:DeepseekSparseSWAMetadata.seq_lens",
    "vllm.v1.attention.backends.mla.sparse_swa:"
    "DeepseekSparseSWAMetadata.prefill_query_lens_cpu since 0.24",
    "vllm.v1.attention.backends.mla.sparse_swa:"
    "DeepseekSparseSWAMetadata.prefill_seq_lens_cpu since 0.24",
    "vllm.v1.attention.backends.mla.sparse_swa:"
    "DeepseekSparseSWAMetadata.prefill_swa_indices since 0.24",
    "vllm.models.deepseek_v4.nvidia.model:_select_dsv4_attn_cls(vllm_config) since 0.24",
    "vllm.models.deepseek_v4.nvidia.flashmla:DeepseekV4FlashMLAAttention since 0.24",
    "vllm.models.deepseek_v4.nvidia.flashinfer_sparse:DeepseekV4FlashInferMLAAttention since 0.24",
    "vllm.models.deepseek_v4.nvidia.flashinfer_sparse:"
    "DeepseekV4FlashInferSM120Attention since 0.24",
    "vllm.config.parallel:ParallelConfig.decode_context_parallel_size",
    "vllm.config.parallel:ParallelConfig.prefill_context_parallel_size",
    "vllm.config.parallel:ParallelConfig.use_ubatching",
    "vllm.platforms:current_platform",
    "vllm.platforms.interface:Platform.is_cuda",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.input_batch",
    "vllm.v1.worker.gpu_input_batch:InputBatch.req_ids",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_attn(input_batch)",
    "vllm.v1.worker.gpu.input_batch:InputBatch.req_ids",
)

logger = logging.getLogger("vllm.vision_exp")

REQUIRE_VARIABLE = "VISION_EXP_REQUIRE_VISIBILITY"
BIDIRECTIONAL = "bidirectional"
_ATTRIBUTE = "vision_exp_visible"
_SWA = "vllm.v1.attention.backends.mla.sparse_swa"
_FLASHMLA = "vllm.models.deepseek_v4.nvidia.flashmla"
_FLASHINFER = "vllm.models.deepseek_v4.nvidia.flashinfer_sparse"
_RUNNERS = {
    "vllm.v1.worker.gpu_model_runner": "GPUModelRunner._build_attention_metadata",
    "vllm.v1.worker.gpu.model_runner": "GPUModelRunner.prepare_attn",
}


@dataclass(frozen=True)
class Visible:
    """The images of one batch's prefill rows; `window` and `image_tokens` bound a row's keys.

    left, right: int32 (prefill rows,), positions that a row sees beside itself in its image, 0
    outside images. A row at position p sees max(min(p - window + 1, p - left), 0)..p + right.
    spans: the same on the host, in row order. rows: int64 (image rows,), the indices of image rows
    among the prefill rows, span by span. cache: what the attention classes derive once per step.
    """

    left: torch.Tensor
    right: torch.Tensor
    rows: torch.Tensor
    spans: tuple[RowSpan, ...]
    window: int
    image_tokens: int
    cache: dict[Any, Any] = field(default_factory=dict)

    @property
    def width(self) -> int:
        return visibility_rows.widest(self.window, self.image_tokens)

    def any_in(self, start: int, stop: int) -> bool:
        """True if an image row is among prefill rows [start, stop)."""
        return any(span.row < stop and span.row + span.count > start for span in self.spans)


def of(metadata: Any) -> Visible | None:
    """What the builder's wrapper attached to sliding-window metadata; None: all rows are causal."""
    return getattr(metadata, _ATTRIBUTE, None)


def install() -> None:
    """Wrap runners, metadata builder and attention classes, now or when vLLM imports them."""
    patching.when_imported("vllm.v1.worker.gpu_model_runner", _wrap_runner_v1)
    patching.when_imported("vllm.v1.worker.gpu.model_runner", _wrap_runner_v2)
    patching.when_imported(_SWA, _wrap_builder)
    patching.when_imported(_FLASHMLA, _wrap_flashmla)
    patching.when_imported(_FLASHINFER, _wrap_flashinfer)


def describe(vllm_config: Any) -> str:
    """`bidirectional`, or `causal reason=...` for what this installation cannot do.

    Raises RuntimeError instead of the latter under VISION_EXP_REQUIRE_VISIBILITY=1.
    """
    reason = _reason(vllm_config)
    if reason is None:
        return BIDIRECTIONAL
    if os.environ.get(REQUIRE_VARIABLE, "0") not in ("", "0"):
        raise RuntimeError(
            f"[vision-exp] image tokens would not see each other ({reason}) and "
            f"{REQUIRE_VARIABLE}=1 forbids to start without"
        )
    return f"causal reason={reason}"


def _reason(vllm_config: Any) -> str | None:
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return "platform-is-not-cuda"
    parallel = vllm_config.parallel_config
    if getattr(parallel, "use_ubatching", False):
        return "micro-batches-reorder-requests"
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name}-above-1"
    missing = missing_hooks()
    if missing is not None:
        return f"release-lacks-{missing}"
    from vllm.models.deepseek_v4.nvidia import model

    name = model._select_dsv4_attn_cls(vllm_config).__name__
    if name == "DeepseekV4FlashMLAAttention":
        return None
    if name.startswith("DeepseekV4FlashInfer"):
        from vision_exp.visibility import flashinfer

        return flashinfer.reason(name, vllm_config)
    return f"unknown-attention-class-{name}"


def missing_hooks() -> str | None:
    """The first function or field that this release's attention code lacks, if any."""
    import dataclasses
    import importlib

    swa = importlib.import_module(_SWA)
    fields = {f.name for f in dataclasses.fields(swa.DeepseekSparseSWAMetadata)}
    for name in ("prefill_swa_indices", "prefill_seq_lens_cpu", "prefill_query_lens_cpu"):
        if name not in fields:
            return name
    hooks = {
        _FLASHMLA: ("DeepseekV4FlashMLAAttention._forward_prefill", "combine_topk_swa_indices"),
        _FLASHINFER: (
            "DeepseekV4FlashInferSM120Attention._forward_prefill",
            "DeepseekV4FlashInferMLAAttention._forward",
        ),
    }
    for module_name, names in hooks.items():
        module = importlib.import_module(module_name)
        for name in names:
            if not has(module, name):
                return name
    for module_name, name in _RUNNERS.items():
        runner = sys.modules.get(module_name)  # the runner in use has been imported
        if runner is not None and not has(runner, name):
            return name
    return None


def has(module: Any, name: str) -> bool:
    """True if `module` has the dotted `name`."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is not None


# The order of requests in the batch, which metadata does not carry. The target sets it; the draft
# keeps it.
_order: tuple[str, ...] = ()


def set_order(request_ids: Sequence[str]) -> None:
    """Name the requests of the batch for which metadata is built next, in batch order."""
    global _order
    _order = tuple(request_ids) if step.current().spans else ()


# Releases without one of these are found by missing_hooks and described; importing them works.
def _wrap_runner_v1(module: Any) -> None:
    if has(module, "GPUModelRunner._build_attention_metadata"):
        patching.wrap(module.GPUModelRunner, "_build_attention_metadata", _order_v1)


def _order_v1(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    set_order(runner.input_batch.req_ids)
    return original(runner, *args, **kwargs)


def _wrap_runner_v2(module: Any) -> None:
    if has(module, "GPUModelRunner.prepare_attn"):
        patching.wrap(module.GPUModelRunner, "prepare_attn", _order_v2)


def _order_v2(
    original: Callable[..., Any], runner: Any, input_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    set_order(input_batch.req_ids)
    return original(runner, input_batch, *args, **kwargs)


def _wrap_builder(module: Any) -> None:
    builder = module.DeepseekSparseSWAMetadataBuilder
    patching.wrap(builder, "__init__", _builder_init)
    patching.wrap(builder, "build", _builder_build)


def _builder_init(original: Callable[..., Any], builder: Any, *args: Any, **kwargs: Any) -> None:
    from vision_exp.install import is_vision_exp

    original(builder, *args, **kwargs)
    config = builder.vllm_config
    builder._vision_exp_tokens = 0
    hf_config = config.model_config.hf_config
    if is_vision_exp(hf_config) and describe(config) == BIDIRECTIONAL:
        builder._vision_exp_tokens = hf_config.vision_max_n_token


def _builder_build(original: Callable[..., Any], builder: Any, *args: Any, **kwargs: Any) -> Any:
    metadata = original(builder, *args, **kwargs)
    images = step.current()
    if images.spans and builder._vision_exp_tokens and metadata.num_prefill_tokens:
        if not _order:
            raise RuntimeError("[vision-exp] a batch with images was built in an unknown order")
        visible = visible_rows(
            metadata, images, _order, builder.window_size, builder._vision_exp_tokens
        )
        if visible is not None:
            setattr(metadata, _ATTRIBUTE, visible)
    return metadata


def visible_rows(
    metadata: Any, images: step.StepImages, order: Sequence[str], window: int, image_tokens: int
) -> Visible | None:
    """The images among the prefill rows of `metadata`; None if there are none.

    Reads host tensors only. They are exact for prefill requests, also with asynchronous scheduling.
    """
    count = metadata.num_prefills
    lens = metadata.prefill_query_lens_cpu[:count].tolist()
    stops = metadata.prefill_seq_lens_cpu[:count].tolist()
    names = order[metadata.num_decodes : metadata.num_decodes + count]
    # A padded batch ends in requests without rows and without names.
    names = [*names, *[""] * (count - len(names))]
    whole, split = visibility_rows.row_spans(images.spans, names, lens, stops)
    for span in split:
        logger.error(
            "[vision-exp] rows of image %d..%d of request %s stay causal: only a part of it is "
            "prefilled in this step",
            span.start,
            span.end,
            names[span.request],
        )
    if not whole:
        return None
    longest = max(span.count for span in whole)
    if longest > image_tokens:
        raise ValueError(f"an image of {longest} tokens exceeds vision_max_n_token={image_tokens}")
    device = metadata.seq_lens.device
    reach = upload(visibility_rows.reach(whole, metadata.num_prefill_tokens), device)
    rows = np.concatenate([np.arange(s.row, s.row + s.count, dtype=np.int64) for s in whole])
    return Visible(reach[0], reach[1], upload(rows, device), tuple(whole), window, image_tokens)


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """`values` on `device`, without waiting for the device."""
    host = torch.from_numpy(values)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def _wrap_flashmla(module: Any) -> None:
    from vision_exp.visibility import flashmla

    flashmla.wrap(module)


def _wrap_flashinfer(module: Any) -> None:
    from vision_exp.visibility import flashinfer

    flashinfer.wrap(module)
