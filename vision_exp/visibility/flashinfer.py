"""FlashInfer (SM120's default, SM100 on request): a second pass over the image rows only.

Both kernels take 128 sliding-window keys per row in prefill: SM120's kernel for two caches is built
for no other number, and SM100's reads the columns after the 128th from the compressed cache. So
vLLM's own pass runs as it is, and then image rows are attended again with all of their keys:

- SM120: with FlashInfer's decode kernel, which takes 512 and at most 64 rows per call;
- SM100: over the keys gathered as BF16, with FlashMLA's sparse prefill kernel.

What FlashInfer 0.6.14 to 0.6.18 checks of a call for SM120, and who keeps it:

| check, in flashinfer/mla/_sparse_mla_sm120.py | kept by |
|---|---|
| `_decode_dsv4_dispatchable`: rows <= _DECODE_MAX_TOKENS (64) | `sm120_rows` |
| the same: (heads, keys) in _DECODE_DSV4_DISPATCH | `support.sm120_reason`, at start |
| the same: d_qk == 512, page size == _DECODE_DSV4_PAGE_BLOCK_SIZE (64) | vLLM's cache |
| `_decode_scratch_views`: partial results fit the workspace | `sm120_rows` |
| none: an index inside the cache | `_slots`: positions inside the table, -1 where unused |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from vision_exp.visibility import spans
from vision_exp.visibility.spans import ImageVisibility, RowSpan

SM120_ROWS = 64  # most rows of FlashInfer's SM120 decode kernel
SM120_TILE = 64  # keys per partial result that it keeps in the workspace
SM100_KEYS = 1 << 14  # most compressed keys that are copied for one call, 16 MiB of BF16
HEAD_DIM = 512


def attend_sm120(
    layer: Any,
    visibility: ImageVisibility,
    *,
    q: torch.Tensor,
    compressed_k_cache: torch.Tensor | None,
    swa_k_cache: torch.Tensor,
    output: torch.Tensor,
    attn_metadata: Any,
    swa_metadata: Any,
) -> None:
    """Attend the image rows of `output` again; keywords as of vLLM's `_forward_prefill`."""
    from vllm.models.deepseek_v4.nvidia import flashinfer_sparse as module

    rows = visibility.rows
    query = layer._prepare_query(q.index_select(0, rows), output)
    indices, lens = slots(visibility, swa_metadata)
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


def slots(visibility: ImageVisibility, swa_metadata: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Cache slots of the sliding-window keys of every image row, made once per step.

    int32 (image rows, 1, width), -1 where unused, and int32 (image rows,), how many are used.
    """
    if "slots" not in visibility.cache:
        visibility.cache["slots"] = _slots(visibility, swa_metadata)
    return visibility.cache["slots"]


def _slots(visibility: ImageVisibility, swa_metadata: Any) -> tuple[torch.Tensor, torch.Tensor]:
    table, size = swa_metadata.block_table, swa_metadata.block_size
    last = max(span.image.stop for span in visibility.spans)
    if last > table.shape[1] * size:
        # FlashInfer checks no index: it would read another request's cache, or none.
        raise ValueError(
            f"[vision-exp] an image ends at position {last}, and the cache's table has "
            f"{table.shape[1]} pages of {size}: its keys are out of range"
        )
    found = [spans.keys(span.image, visibility.window) for span in visibility.spans]
    request = [
        np.full(s.count, swa_metadata.num_decodes + s.request, np.int32) for s in visibility.spans
    ]
    host = np.stack(
        [
            np.concatenate([first for first, _ in found]),
            np.concatenate([count for _, count in found]),
            np.concatenate(request),
        ]
    )
    first, count, request_row = spans.upload(host, table.device)
    column = torch.arange(visibility.width, dtype=torch.int32, device=table.device)
    used = column < count[:, None]
    position = torch.where(used, first[:, None] + column, first[:, None])
    block = table[request_row.long()[:, None], (position // size).long()]
    slot = block * size + position % size
    return torch.where(used, slot, -1).to(torch.int32)[:, None], count.contiguous()


def attend_sm100(layer: Any, visibility: ImageVisibility, **kwargs: Any) -> None:
    """Attend the image rows of `output` again; keywords as of vLLM's `_forward`."""
    decodes = kwargs["swa_metadata"].num_decode_tokens
    for span in visibility.spans:
        for rows in slices(span.count, sm100_rows(layer, span)):
            start = decodes + span.row
            part = slice(start + rows.start, start + rows.stop)
            query, sink = _pad_heads(kwargs["q"][part], layer.attn_sink, kwargs["output"].shape[1])
            keys, indices, lens = gathered(layer, visibility, span, rows, **kwargs)
            attended = _flash_mla_sparse_fwd(query, keys, indices, layer.scale, sink, lens)
            kwargs["output"][part] = attended[:, : kwargs["output"].shape[1]]


def sm100_rows(layer: Any, span: RowSpan) -> int:
    """Rows of an image per call. All of them while its compressed keys are few enough to copy.

    At a million tokens those are 256 MiB in a layer of ratio 4; then a call's rows are so few that
    the keys which the indexer chose for them are no more. With ratio 128 they are always few.
    """
    if layer.compress_ratio != 4 or span.image.stop // 4 <= SM100_KEYS:
        return span.count
    return max(1, SM100_KEYS // layer.topk_indices_buffer.shape[-1])


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
    visibility: ImageVisibility,
    span: RowSpan,
    rows: slice,
    *,
    kv_cache: torch.Tensor | None,
    swa_k_cache: torch.Tensor,
    swa_metadata: Any,
    attn_metadata: Any,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The keys of `rows` of one image, BF16 (keys, 512), and index rows into them.

    Index rows: int32 (rows, columns), -1 where unused, columns a multiple of 128; int32 (rows,),
    the used columns. A row's compressed keys come first, then its sliding-window keys. Where there
    are too many compressed keys, those are copied that each row names, in the order of the rows.
    """
    device = swa_k_cache.device
    image = span.image
    first, count = spans.keys(image, visibility.window)
    start = int(first[0])
    first, count = first[rows], count[rows]
    batch_rows = slice(span.row + rows.start, span.row + rows.stop)
    table = swa_metadata.block_table[swa_metadata.num_decodes + span.request]
    keys = [
        _take(
            swa_k_cache,
            table,
            swa_metadata.block_size,
            torch.arange(start, image.stop, device=device),
        )
    ]
    window_keys = image.stop - start
    topk = 0
    lens_topk = np.zeros(len(count), dtype=np.int32)
    if layer.compress_ratio > 1 and kv_cache is not None:
        ratio = layer.compress_ratio
        if ratio == 4:
            before = swa_metadata.num_decode_tokens
            local = layer.topk_indices_buffer[before + batch_rows.start : before + batch_rows.stop]
        else:
            local = attn_metadata.c128a_prefill_topk_indices[batch_rows]
        topk = local.shape[-1]
        # As many as the indexer and the C128A builder fill, by position alone.
        position = np.arange(image.first, image.stop, dtype=np.int32)[rows]
        lens_topk = np.minimum((position + 1) // ratio, topk).astype(np.int32)
        compressed = attn_metadata.block_table[swa_metadata.num_decodes + span.request]
        size = attn_metadata.block_size // ratio
        if ratio == 4 and image.stop // ratio > SM100_KEYS:
            wanted = local.clamp(min=0).flatten()
            places = torch.arange(wanted.numel(), dtype=torch.int32, device=device)
            local = torch.where(local < 0, -1, places.view(local.shape))
        else:
            wanted = torch.arange(image.stop // ratio, device=device)
        keys.append(_take(kv_cache, compressed, size, wanted))
    columns = -(-(topk + visibility.width) // 128) * 128
    first, count, lens_topk = spans.upload(np.stack([first, count, lens_topk]), device)
    column = torch.arange(columns, dtype=torch.int32, device=device)
    in_window = column - lens_topk[:, None]
    indices = torch.where(in_window < count[:, None], first[:, None] - start + in_window, -1)
    if topk:
        wide = torch.where(local < 0, -1, local + window_keys)
        wide = torch.nn.functional.pad(wide, (0, columns - topk), value=-1)
        indices = torch.where(in_window < 0, wide, indices)
    return torch.cat(keys), indices.to(torch.int32), count + lens_topk


def _take(
    cache: torch.Tensor, table: torch.Tensor, size: int, position: torch.Tensor
) -> torch.Tensor:
    """Rows at these positions of one request from a paged cache (blocks, size, 512), as BF16."""
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
