"""FlashMLA (SM90, SM100's default) and ROCm: wider rows of gathered keys for chunks with an image.

`_forward_prefill` gathers, per group of requests, the compressed keys and then the sliding-window
keys from window - 1 before the chunk to the chunk's end, so every key of a whole image is there.
Only the index rows, written by `combine_topk_swa_indices`, need to reach them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.triton_utils import tl, triton

from vision_exp.engine import context
from vision_exp.visibility.spans import ImageVisibility

# FlashMLA's sparse prefill wants the number of columns to be a multiple of this.
ALIGNMENT = 128
WORKERS = 128


@dataclass(frozen=True)
class PrefillCursor:
    """The images of the running `_forward_prefill`, and how many prefill rows are indexed yet."""

    visibility: ImageVisibility
    row: int = 0


def combine(
    original: Callable[..., Any], topk_indices: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """vLLM's `combine_topk_swa_indices`, or `combine_wide` for a call with image rows."""
    cursor: PrefillCursor | None = context.current().prefill
    if cursor is None:
        return original(topk_indices, *args, **kwargs)
    # vLLM goes through the prefill requests in order, a group of them per call.
    visibility, start = cursor.visibility, cursor.row
    stop = start + topk_indices.shape[0]
    context.publish(prefill=PrefillCursor(visibility, stop))
    if not visibility.any_in(start, stop):
        return original(topk_indices, *args, **kwargs)
    lookback, lookahead = visibility.lookback[start:stop], visibility.lookahead[start:stop]
    kwargs.pop("out", None)  # vLLM's buffer is as wide as a causal row
    return combine_wide(topk_indices, lookback, lookahead, visibility.image_tokens, *args, **kwargs)


def combine_wide(
    topk_indices: torch.Tensor,
    lookback: torch.Tensor,
    lookahead: torch.Tensor,
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

    topk_indices: int32 (rows, >= topk); lookback, lookahead: int32 (rows,). Request i of the group
    has its keys at M * i: compressed ones first, sliding-window ones from N on. Returns int32
    (rows, columns), -1 where unused, and int32 (rows,), the used columns of each row.
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
        lookback,
        lookahead,
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
    lookback_ptr,
    lookahead_ptr,
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
        first = tl.minimum(position - WINDOW + 1, position - tl.load(lookback_ptr + row))
        first = tl.maximum(first, 0)
        count = position + tl.load(lookahead_ptr + row) - first + 1
        out = indices_ptr + row * indices_stride
        selected = tl.load(topk_ptr + row * topk_stride + topk_column, mask=topk_column < topk_len)
        # ROCm's top-k may leave columns unused, and its own kernel keeps them so.
        selected = tl.where((selected >= 0) & (selected < N), selected + M * request, -1)
        tl.store(out + topk_column, selected, mask=topk_column < topk_len)
        key = M * request + N + first - first_gathered + key_column
        tl.store(out + topk_len + key_column, key, mask=key_column < count)
        tl.store(lens_ptr + row, topk_len + count)
