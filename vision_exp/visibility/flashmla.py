"""FlashMLA (SM90, and SM100's default): wider rows of gathered keys for chunks with an image.

`_forward_prefill` gathers, per group of requests, the compressed keys and then the sliding-window
keys from window - 1 before the chunk to the chunk's end, so every key of a whole image is there.
Only the index rows, written by `combine_topk_swa_indices`, need to reach them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.triton_utils import tl, triton

from vision_exp import patching
from vision_exp.visibility import hooks

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.models.deepseek_v4.nvidia.flashmla:"
    "DeepseekV4FlashMLAAttention._forward_prefill(swa_metadata) since 0.24",
    "vllm.models.deepseek_v4.nvidia.flashmla:combine_topk_swa_indices since 0.24",
    "vllm.models.deepseek_v4.common.ops.cache_utils:"
    "combine_topk_swa_indices(topk_indices, query_start_loc, seq_lens, gather_lens, window_size, "
    "compress_ratio, topk, M, N) since 0.24",
    "vllm.triton_utils:tl",
    "vllm.triton_utils:triton",
)

# FlashMLA's sparse prefill wants the number of columns to be a multiple of this.
ALIGNMENT = 128
WORKERS = 128


class _Cursor:
    """The images of the running `_forward_prefill`, and how many prefill rows are indexed yet."""

    def __init__(self, visible: hooks.Visible) -> None:
        self.visible = visible
        self.row = 0


_running: _Cursor | None = None


def wrap(module: Any) -> None:
    """Wrap the attention class of `vllm.models.deepseek_v4.nvidia.flashmla`."""
    if hooks.has(module, "DeepseekV4FlashMLAAttention._forward_prefill"):  # from 0.23
        patching.wrap(module.DeepseekV4FlashMLAAttention, "_forward_prefill", _forward_prefill)
        patching.wrap(module, "combine_topk_swa_indices", _combine)


def _forward_prefill(
    original: Callable[..., Any], layer: Any, *args: Any, swa_metadata: Any, **kwargs: Any
) -> Any:
    global _running
    visible = hooks.of(swa_metadata)
    if visible is None:
        return original(layer, *args, swa_metadata=swa_metadata, **kwargs)
    _running = _Cursor(visible)
    try:
        return original(layer, *args, swa_metadata=swa_metadata, **kwargs)
    finally:
        _running = None


def _combine(
    original: Callable[..., Any], topk_indices: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    cursor = _running
    if cursor is None:
        return original(topk_indices, *args, **kwargs)
    # vLLM goes through the prefill requests in order, a group of them per call.
    start = cursor.row
    stop = cursor.row = start + topk_indices.shape[0]
    if not cursor.visible.any_in(start, stop):
        return original(topk_indices, *args, **kwargs)
    left, right = cursor.visible.left[start:stop], cursor.visible.right[start:stop]
    kwargs.pop("out", None)  # vLLM's buffer is as wide as a causal row
    return combine_wide(topk_indices, left, right, cursor.visible.image_tokens, *args, **kwargs)


def combine_wide(
    topk_indices: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    image_tokens: int,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index rows into gathered keys, as `combine_topk_swa_indices` makes them, images widened.

    topk_indices: int32 (rows, >= topk); left, right: int32 (rows,). Request i of the group has its
    keys at M * i: compressed ones first, sliding-window ones from N on. Returns int32 (rows,
    columns), -1 where unused, and int32 (rows,), the used columns of each row.
    """
    rows = topk_indices.shape[0]
    columns = triton.cdiv(topk + window_size + image_tokens, ALIGNMENT) * ALIGNMENT
    device = topk_indices.device
    indices = torch.full((rows, columns), -1, dtype=torch.int32, device=device)
    lens = torch.empty(rows, dtype=torch.int32, device=device)
    _combine_kernel[(seq_lens.shape[0], WORKERS)](
        indices,
        columns,
        lens,
        topk_indices,
        topk_indices.stride(0),
        left,
        right,
        query_start_loc,
        seq_lens,
        gather_lens,
        M,
        N,
        COMPRESS_RATIO=compress_ratio,
        TOPK=topk,
        TOPK_BLOCK=triton.next_power_of_2(max(topk, 1)),
        WINDOW=window_size,
        WINDOW_BLOCK=triton.next_power_of_2(window_size + image_tokens),
    )
    return indices, lens


@triton.jit(do_not_specialize=["M", "N"])
def _combine_kernel(
    indices_ptr,
    indices_stride,
    lens_ptr,
    topk_ptr,
    topk_stride,
    left_ptr,
    right_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    gather_lens_ptr,
    M,
    N,
    COMPRESS_RATIO: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    base = tl.load(query_start_loc_ptr)
    query_start = tl.load(query_start_loc_ptr + request) - base
    query_end = tl.load(query_start_loc_ptr + request + 1) - base
    seq_len = tl.load(seq_lens_ptr + request)
    first_position = seq_len - (query_end - query_start)
    # Position of the first gathered sliding-window key.
    first_gathered = seq_len - tl.load(gather_lens_ptr + request)
    topk_column = tl.arange(0, TOPK_BLOCK)
    key_column = tl.arange(0, WINDOW_BLOCK)
    for row in range(query_start + tl.program_id(1), query_end, tl.num_programs(1)):
        position = first_position + row - query_start
        # The indexer and the C128A builder fill this many columns, by position alone.
        topk_len = tl.minimum((position + 1) // COMPRESS_RATIO, TOPK)
        first = tl.minimum(position - WINDOW + 1, position - tl.load(left_ptr + row))
        first = tl.maximum(first, 0)
        count = position + tl.load(right_ptr + row) - first + 1
        out = indices_ptr + row * indices_stride
        selected = tl.load(topk_ptr + row * topk_stride + topk_column, mask=topk_column < topk_len)
        tl.store(out + topk_column, selected + M * request, mask=topk_column < topk_len)
        key = M * request + N + first - first_gathered + key_column
        tl.store(out + topk_len + key_column, key, mask=key_column < count)
        tl.store(lens_ptr + row, topk_len + count)
