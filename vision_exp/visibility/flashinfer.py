"""FlashInfer (SM120's default, SM100 on request): a second pass over the image rows only.

Both kernels take 128 sliding-window keys per row in prefill: SM120's kernel for two caches is built
for no other number, and SM100's reads the columns after the 128th from the compressed cache. So
vLLM's own pass runs as it is, and then image rows are attended again with all of their keys:

- SM120: with FlashInfer's decode kernel, which takes 512 and at most 64 rows per call;
- SM100: over the keys gathered as BF16, with FlashMLA's sparse prefill kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from vision_exp import patching
from vision_exp.visibility import hooks, spans
from vision_exp.visibility.hooks import Visible
from vision_exp.visibility.spans import RowSpan

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.models.deepseek_v4.nvidia.flashinfer_sparse:"
    "DeepseekV4FlashInferSM120Attention._as_sparse_cache since 0.24",
    "vllm.models.deepseek_v4.nvidia.flashinfer_sparse:"
    "DeepseekV4FlashInferSM120Attention._forward_prefill(q, compressed_k_cache, swa_k_cache, "
    "output, attn_metadata, swa_metadata) since 0.24",
    "vllm.models.deepseek_v4.nvidia.flashinfer_sparse:"
    "DeepseekV4FlashInferSM120Attention._get_workspace since 0.24",
    "vllm.models.deepseek_v4.nvidia.flashinfer_sparse:"
    "DeepseekV4FlashInferSM120Attention._prepare_query(q, output) since 0.24",
    "vllm.models.deepseek_v4.nvidia.flashinfer_sparse:"
    "DeepseekV4FlashInferSM120Attention.get_padded_num_q_heads since 0.24",
    "vllm.models.deepseek_v4.nvidia.flashinfer_sparse:"
    "DeepseekV4FlashInferMLAAttention._forward(q, kv_cache, swa_k_cache, swa_metadata, "
    "attn_metadata, output) since 0.24",
    "vllm.models.deepseek_v4.nvidia.flashinfer_sparse:"
    "compute_global_topk_indices_and_lens since 0.24",
    "vllm.models.deepseek_v4.nvidia.flashinfer_sparse:"
    "flashinfer_trtllm_batch_decode_sparse_mla_dsv4 since 0.24",
    "vllm.models.deepseek_v4.common.ops.cache_utils:"
    "compute_global_topk_indices_and_lens(topk_indices, token_to_req_indices, block_table, "
    "block_size, is_valid_token) since 0.24",
    "vllm.models.deepseek_v4.attention:DeepseekV4Attention.attn_sink since 0.24",
    "vllm.models.deepseek_v4.attention:DeepseekV4Attention.compress_ratio since 0.24",
    "vllm.models.deepseek_v4.attention:DeepseekV4Attention.scale since 0.24",
    "vllm.models.deepseek_v4.attention:DeepseekV4Attention.topk_indices_buffer since 0.24",
    "vllm.models.deepseek_v4.sparse_mla:DeepseekV4FlashMLAMetadata.block_size since 0.24",
    "vllm.models.deepseek_v4.sparse_mla:DeepseekV4FlashMLAMetadata.block_table since 0.24",
    "vllm.models.deepseek_v4.sparse_mla:"
    "DeepseekV4FlashMLAMetadata.c128a_prefill_topk_indices since 0.24",
    "vllm.v1.attention.backends.mla.sparse_swa:DeepseekSparseSWAMetadata.block_size",
    "vllm.v1.attention.backends.mla.sparse_swa:DeepseekSparseSWAMetadata.block_table",
    "vllm.v1.attention.backends.mla.sparse_swa:DeepseekSparseSWAMetadata.is_valid_token",
    "vllm.v1.attention.backends.mla.sparse_swa:DeepseekSparseSWAMetadata.num_decode_tokens",
    "vllm.v1.attention.backends.mla.sparse_swa:DeepseekSparseSWAMetadata.num_decodes",
    "vllm.v1.attention.backends.mla.sparse_swa:DeepseekSparseSWAMetadata.token_to_req_indices",
    "vllm.v1.attention.ops.flashmla:flash_mla_sparse_fwd",
    "vllm.v1.attention.ops.flashmla:is_flashmla_sparse_supported",
)

SM120_ROWS = 64  # most rows of FlashInfer's SM120 decode kernel
SM120_TILE = 64  # keys per partial result that it keeps in the workspace
HEAD_DIM = 512


def reason(class_name: str, vllm_config: Any) -> str | None:
    """Why layers of this class cannot widen image rows here, or None if they can."""
    hf_config = vllm_config.model_config.hf_config
    width = spans.widest(hf_config.sliding_window, hf_config.vision_max_n_token)
    if class_name == "DeepseekV4FlashInferSM120Attention":
        from vllm.models.deepseek_v4.nvidia.flashinfer_sparse import (
            DeepseekV4FlashInferSM120Attention as Layer,
        )

        shards = vllm_config.parallel_config.tensor_parallel_size
        heads = Layer.get_padded_num_q_heads(hf_config.num_attention_heads // shards)
        return sm120_reason(sm120_shapes(), heads, width)
    if class_name == "DeepseekV4FlashInferMLAAttention":
        from vllm.v1.attention.ops.flashmla import is_flashmla_sparse_supported

        supported, _ = is_flashmla_sparse_supported()
        return None if supported else "flashinfer-sm100-window-is-fixed-and-flashmla-is-missing"
    return f"unknown-attention-class-{class_name}"


def sm120_shapes() -> frozenset[tuple[int, int]]:
    """(heads, keys) that the installed FlashInfer's SM120 decode kernel is built for."""
    import importlib

    try:
        module = importlib.import_module("flashinfer.mla._sparse_mla_sm120")
    except ImportError:  # before 0.6.14
        return frozenset()
    return frozenset(getattr(module, "_DECODE_DSV4_DISPATCH", ()))


def sm120_reason(shapes: frozenset[tuple[int, int]], heads: int, width: int) -> str | None:
    """Why SM120's kernel cannot take rows of `width` keys, or None."""
    if not shapes:
        return "flashinfer-has-no-sm120-sparse-mla"
    if (heads, width) not in shapes:
        return f"flashinfer-sm120-has-no-kernel-for-{heads}-heads-{width}-keys"
    return None


def wrap(module: Any) -> None:
    """Wrap the attention classes of `vllm.models.deepseek_v4.nvidia.flashinfer_sparse`."""
    if hooks.has(module, "DeepseekV4FlashInferSM120Attention._forward_prefill"):  # from 0.24
        sm120 = module.DeepseekV4FlashInferSM120Attention
        patching.wrap(sm120, "_forward_prefill", _forward_prefill_sm120)
    if hooks.has(module, "DeepseekV4FlashInferMLAAttention._forward"):
        patching.wrap(module.DeepseekV4FlashInferMLAAttention, "_forward", _forward_sm100)


def _forward_prefill_sm120(original: Callable[..., Any], layer: Any, **kwargs: Any) -> None:
    original(layer, **kwargs)
    visible = hooks.of(kwargs["swa_metadata"])
    if visible is not None:
        _again_sm120(layer, visible, **kwargs)


def _again_sm120(
    layer: Any,
    visible: Visible,
    *,
    q: torch.Tensor,
    compressed_k_cache: torch.Tensor | None,
    swa_k_cache: torch.Tensor,
    output: torch.Tensor,
    attn_metadata: Any,
    swa_metadata: Any,
) -> None:
    from vllm.models.deepseek_v4.nvidia import flashinfer_sparse as module

    rows = visible.rows
    query = layer._prepare_query(q.index_select(0, rows), output)
    indices, lens = slots(visible, swa_metadata)
    extra_indices = extra_lens = extra_cache = None
    if layer.compress_ratio > 1:
        batch_rows = rows + swa_metadata.num_decode_tokens
        if layer.compress_ratio == 4:
            local = layer.topk_indices_buffer.index_select(0, batch_rows)
        else:
            local = attn_metadata.c128a_prefill_topk_indices.index_select(0, rows)
        extra_indices, extra_lens = module.compute_global_topk_indices_and_lens(
            local,
            swa_metadata.token_to_req_indices.index_select(0, batch_rows),
            attn_metadata.block_table,
            attn_metadata.block_size // layer.compress_ratio,
            swa_metadata.is_valid_token.index_select(0, batch_rows),
        )
        extra_cache = layer._as_sparse_cache(compressed_k_cache)
    workspace = layer._get_workspace(q.device)
    attended = output.new_empty((rows.shape[0], *output.shape[1:]))
    keys = indices.shape[-1] + (0 if extra_indices is None else extra_indices.shape[-1])
    for part in slices(rows.shape[0], sm120_rows(workspace.nbytes, query.shape[1], keys)):
        module.flashinfer_trtllm_batch_decode_sparse_mla_dsv4(
            query=query[part],
            swa_kv_cache=layer._as_sparse_cache(swa_k_cache),
            workspace_buffer=workspace,
            sparse_indices=indices[part],
            compressed_kv_cache=extra_cache,
            out=attended[part],
            bmm1_scale=layer.scale,
            sinks=layer.attn_sink,
            kv_layout="NHD",
            swa_topk_lens=lens[part],
            extra_sparse_indices=None if extra_indices is None else extra_indices[part],
            extra_sparse_topk_lens=None if extra_lens is None else extra_lens[part],
        )
    output.index_copy_(0, rows, attended)


def sm120_rows(workspace_bytes: int, heads: int, keys: int) -> int:
    """Rows per call whose partial results, BF16 and one float32 per head, fit the workspace."""
    tiles = -(-keys // SM120_TILE) + 1
    return max(1, min(SM120_ROWS, workspace_bytes // (heads * tiles * (2 * HEAD_DIM + 4))))


def slices(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def slots(visible: Visible, swa_metadata: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Cache slots of the sliding-window keys of every image row, made once per step.

    int32 (image rows, 1, width), -1 where unused, and int32 (image rows,), how many are used.
    """
    if "slots" not in visible.cache:
        visible.cache["slots"] = _slots(visible, swa_metadata)
    return visible.cache["slots"]


def _slots(visible: Visible, swa_metadata: Any) -> tuple[torch.Tensor, torch.Tensor]:
    table, size = swa_metadata.block_table, swa_metadata.block_size
    found = [spans.keys(span, visible.window) for span in visible.spans]
    request = [
        np.full(s.count, swa_metadata.num_decodes + s.request, np.int32) for s in visible.spans
    ]
    host = np.stack(
        [
            np.concatenate([first for first, _ in found]),
            np.concatenate([count for _, count in found]),
            np.concatenate(request),
        ]
    )
    first, count, request_row = hooks.upload(host, table.device)
    column = torch.arange(visible.width, dtype=torch.int32, device=table.device)
    used = column < count[:, None]
    position = torch.where(used, first[:, None] + column, first[:, None])
    block = table[request_row.long()[:, None], (position // size).long()]
    slot = block * size + position % size
    return torch.where(used, slot, -1).to(torch.int32)[:, None], count.contiguous()


def _forward_sm100(original: Callable[..., Any], layer: Any, **kwargs: Any) -> None:
    original(layer, **kwargs)
    visible = hooks.of(kwargs["swa_metadata"])
    if visible is None:
        return
    decodes = kwargs["swa_metadata"].num_decode_tokens
    for span in visible.spans:
        part = slice(decodes + span.row, decodes + span.row + span.count)
        query, sink = _pad_heads(kwargs["q"][part], layer.attn_sink, kwargs["output"].shape[1])
        keys, indices, lens = gathered(layer, visible, span, part, **kwargs)
        attended = _flash_mla_sparse_fwd(query, keys, indices, layer.scale, sink, lens)
        kwargs["output"][part] = attended[:, : kwargs["output"].shape[1]]


def _pad_heads(
    query: torch.Tensor, sink: torch.Tensor, padded: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """BF16 query (rows, heads, 512) and sink (heads,) for FlashMLA, which takes 64 or 128 heads.

    The plain cache layout's FP8 scale is 1. Added heads have no sink; their results are dropped.
    """
    heads = 64 if padded <= 64 else 128
    query = query.to(torch.bfloat16)
    query = torch.nn.functional.pad(query, (0, 0, 0, heads - query.shape[1])).contiguous()
    sink = torch.nn.functional.pad(sink, (0, heads - sink.shape[0]), value=-float("inf"))
    return query, sink


def gathered(
    layer: Any,
    visible: Visible,
    span: RowSpan,
    part: slice,
    *,
    kv_cache: torch.Tensor | None,
    swa_k_cache: torch.Tensor,
    swa_metadata: Any,
    attn_metadata: Any,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The keys of one image's rows, BF16 (keys, 512), and index rows into them.

    Index rows: int32 (rows, columns), -1 where unused, columns a multiple of 128; int32 (rows,),
    the used columns. A row's compressed keys come first, then its sliding-window keys. `part`: the
    image's rows in the batch.
    """
    device = swa_k_cache.device
    first, count = spans.keys(span, visible.window)
    start = int(first[0])
    table = swa_metadata.block_table[swa_metadata.num_decodes + span.request]
    keys = [_take(swa_k_cache, table, swa_metadata.block_size, start, span.end + 1)]
    window_keys = span.end + 1 - start
    topk = 0
    lens_topk = np.zeros(span.count, dtype=np.int32)
    if layer.compress_ratio > 1 and kv_cache is not None:
        ratio = layer.compress_ratio
        if ratio == 4:
            local = layer.topk_indices_buffer[part]
        else:
            local = attn_metadata.c128a_prefill_topk_indices[span.row : span.row + span.count]
        topk = local.shape[-1]
        # As many as the indexer and the C128A builder fill, by position alone.
        position = np.arange(span.start, span.end + 1, dtype=np.int32)
        lens_topk = np.minimum((position + 1) // ratio, topk).astype(np.int32)
        compressed = attn_metadata.block_table[swa_metadata.num_decodes + span.request]
        size = attn_metadata.block_size // ratio
        keys.append(_take(kv_cache, compressed, size, 0, (span.end + 1) // ratio))
    columns = -(-(topk + visible.width) // 128) * 128
    first, count, lens_topk = hooks.upload(np.stack([first, count, lens_topk]), device)
    column = torch.arange(columns, dtype=torch.int32, device=device)
    in_window = column - lens_topk[:, None]
    indices = torch.where(in_window < count[:, None], first[:, None] - start + in_window, -1)
    if topk:
        wide = torch.where(local < 0, -1, local + window_keys)
        wide = torch.nn.functional.pad(wide, (0, columns - topk), value=-1)
        indices = torch.where(in_window < 0, wide, indices)
    return torch.cat(keys), indices.to(torch.int32), count + lens_topk


def _take(
    cache: torch.Tensor, table: torch.Tensor, size: int, start: int, stop: int
) -> torch.Tensor:
    """Rows [start, stop) of one request from a paged cache (blocks, size, 512), as BF16."""
    position = torch.arange(start, stop, device=cache.device)
    blocks = cache.view(-1, size, HEAD_DIM) if cache.is_contiguous() else cache
    return blocks[table[position // size].long(), position % size].to(torch.bfloat16)


def _flash_mla_sparse_fwd(
    query: torch.Tensor,
    keys: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    sink: torch.Tensor,
    lens: torch.Tensor,
) -> torch.Tensor:
    from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd

    out = torch.empty_like(query)
    flash_mla_sparse_fwd(
        q=query,
        kv=keys[:, None],
        indices=indices[:, None],
        sm_scale=scale,
        attn_sink=sink,
        topk_length=lens,
        out=out,
    )
    return out
