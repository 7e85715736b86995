"""FlashInfer on SM120, its default there: a second pass over the image rows only.

Its prefill kernel takes 128 sliding-window keys per row and is built for no other number. So
vLLM's own pass runs as it is, and then image rows are attended again with all of their keys by
FlashInfer's decode kernel, which takes 512 and at most 64 rows per call.

What FlashInfer checks of such a call, by its source lines, and who keeps it. A test holds them
against the wheels. PY: flashinfer/mla/_sparse_mla_sm120.py, or the files of that package. CU: in
flashinfer/data/csrc, sparse_mla_sm120_jit_binding.cu, or sparse_mla_sm120/attention_validation.h
from 0.7.1 on.

| where | from to | line | kept by |
|---|---|---|---|
| PY | 0.6.14 0.7.4 | `_DECODE_MAX_TOKENS = 64` | SM120_ROWS |
| PY | 0.6.14 0.6.18 | `num_tokens <= _DECODE_MAX_TOKENS` | `sm120_rows` |
| PY | 0.7.0 0.7.0 | `num_tokens > _DECODE_MAX_TOKENS or page` | `sm120_rows`, vLLM's cache |
| PY | 0.7.1 0.7.4 | `num_tokens <= _DECODE_MAX_TOKENS and 0 in _candidates(` | `sm120_rows` |
| PY | 0.6.14 0.7.4 | `_DECODE_DSV4_DISPATCH = ` | `support.sm120_reason`, at start |
| PY | 0.6.14 0.7.0 | `(num_heads, topk) in _DECODE_DSV4_DISPATCH` | the same |
| PY | 0.6.14 0.6.18 | `and d_qk == 512` | vLLM's `_prepare_query` |
| PY | 0.6.14 0.6.18 | `page_block_size == _DECODE_DSV4_PAGE_BLOCK_SIZE` | vLLM's pages of 64 |
| PY | 0.6.14 0.7.4 | `if any(mid_out.size(d) < need_out[d] for d in range(4))` | `sm120_rows` |
| PY | 0.6.14 0.7.4 | `if any(mid_lse.size(d) < need_lse[d] for d in range(3))` | `sm120_rows` |
| CU | 0.6.14 0.7.0 | `TVM_FFI_ICHECK_EQ(q.ndim(), 3)` | vLLM's `_prepare_query` |
| CU | 0.6.14 0.7.0 | `TVM_FFI_ICHECK_EQ(indices.size(1), 1)` | `slots` |
| CU | 0.6.14 0.7.0 | `TVM_FFI_ICHECK(extra_indices.has_value())` | both or none, `attend_sm120` |
| CU | 0.7.0 0.7.0 | `TVM_FFI_ICHECK_EQ(indices.stride(-1), 1)` | `slots`: contiguous rows |
| CU | 0.7.0 0.7.4 | `TVM_FFI_ICHECK_EQ(indices.size(0),` | one `part` of everything |
| CU | 0.7.0 0.7.0 | `TVM_FFI_ICHECK_EQ(kv_layout.stride_kv_row, bpt)` | vLLM's cache |
| CU | 0.7.1 0.7.4 | `TVM_FFI_ICHECK_EQ(advance, bpt)` | vLLM's cache |
| CU | 0.7.1 0.7.4 | `heads <= execution::DecodeMaxHeads` | vLLM's padded heads, 8 to 128 |
| CU | 0.7.1 0.7.4 | `(indices.ndim() == 3 && indices.size(1) == 1)` | `slots` |
| CU | 0.7.1 0.7.4 | `indices.stride(0) >= indices.size(-1)` | `slots`: contiguous rows |
| CU | 0.7.1 0.7.4 | `TVM_FFI_ICHECK_GE(out_capacity, tokens * scratch_heads` | `sm120_rows` |

None looks at an index: positions outside the table are refused on the host by `slots`, pages
outside the cache on the device, in stream order before the kernel that would read them. The
compressed keys' slots are vLLM's own, made as for its own rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from vision_exp.visibility import spans
from vision_exp.visibility.spans import ImageVisibility

SM120_ROWS = 64  # most rows of FlashInfer's SM120 decode kernel
SM120_TILE = 64  # keys per partial result that it keeps in the workspace
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
    indices, lens = slots(visibility, swa_metadata, swa_k_cache.shape[0])
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


def slots(
    visibility: ImageVisibility, swa_metadata: Any, pages: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cache slots of the sliding-window keys of every image row, made once per step.

    int32 (image rows, 1, width), -1 where unused, and int32 (image rows,), how many are used.
    `pages`: of the cache, where its kernel reads whatever page the table names. Raises ValueError
    for a position outside the table. A page outside the cache ends the process on a GPU, before the
    kernel: a RuntimeError on a CPU.
    """
    if "slots" not in visibility.cache:
        visibility.cache["slots"] = _slots(visibility, swa_metadata, pages)
    return visibility.cache["slots"]


def _slots(
    visibility: ImageVisibility, swa_metadata: Any, pages: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
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
    if pages is not None:
        # On the device, without waiting: its values are not known here.
        inside = ((block >= 0) & (block < pages)) | ~used
        torch._assert_async(inside.all(), f"[vision-exp] a page outside the cache's {pages}")
    slot = block * size + position % size
    return torch.where(used, slot, -1).to(torch.int32)[:, None], count.contiguous()
