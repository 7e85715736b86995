"""FlashInfer on SM100 (on request): a second pass over the image rows only, as on SM120 (sm120.py).

Its kernel takes 128 sliding-window keys per row in prefill and reads the columns after the 128th
from the compressed cache. So vLLM's own pass runs as it is, and then image rows are attended again
with all of their keys, gathered as BF16, by FlashMLA's sparse prefill kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vision_exp.visibility import spans
from vision_exp.visibility.sm120 import HEAD_DIM, slices
from vision_exp.visibility.spans import ImageVisibility, RowSpan

SM100_KEYS = 1 << 14  # most compressed keys that are copied for one call, 16 MiB of BF16


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
