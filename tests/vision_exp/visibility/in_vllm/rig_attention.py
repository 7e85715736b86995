"""Keys and queries for a batch, and plain attention over them: what a kernel has to compute."""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from rig_visibility import BLOCK, DIM, WINDOW, Batch, seen_by, slot


def attend(q: torch.Tensor, keys: list[torch.Tensor], scale: float, sink: torch.Tensor) -> Any:
    """q (heads, DIM) over the rows in `keys`; the sink takes part in the softmax's sum only."""
    found = torch.cat(keys).float()
    scores = q.float() @ found.T * scale
    top = torch.maximum(scores.max(-1).values, sink)
    weight = torch.exp(scores - top[:, None])
    return weight @ found / (weight.sum(-1) + torch.exp(sink - top))[:, None]


@dataclass
class Sequences:
    """Keys of every request by position, and the caches that hold them."""

    work: Batch
    window_keys: list[torch.Tensor]
    compressed_keys: list[torch.Tensor]
    window_cache: torch.Tensor
    compressed_cache: torch.Tensor
    compressed_table: torch.Tensor
    topk: torch.Tensor  # (rows of the batch, columns), positions in compressed_keys
    topk_lens: list[int]


def sequences(work: Batch, ratio: int) -> Sequences:
    size = 256 // ratio
    blocks = int(work.table.max()) + 1
    cache = torch.zeros(blocks, BLOCK, DIM)
    window_keys, compressed_keys = [], []
    for i, request in enumerate(work.requests):
        values = torch.randn(request.total, DIM) / 8
        window_keys.append(values)
        for position in range(request.total):
            cache.view(-1, DIM)[slot(work, i, position)] = values[position]
        compressed_keys.append(torch.randn(request.total // ratio, DIM) / 8 if ratio > 1 else None)
    most = max(r.total for r in work.requests) // 256 + 1
    table = torch.randperm(len(work.requests) * most).to(torch.int32).view(-1, most)
    compressed = torch.zeros(len(work.requests) * most, size, DIM)
    for i, keys in enumerate(compressed_keys):
        for at in range(0 if keys is None else len(keys)):
            compressed[table[i, at // size], at % size] = keys[at]
    columns = 16 if ratio == 4 else 4096 // 128
    topk, lens = [], []
    for request in work.requests:
        for position in range(request.total - request.new, request.total):
            have = (position + 1) // ratio if ratio > 1 else 0
            used = min(have, columns)
            chosen = random.sample(range(have), used) if ratio == 4 else list(range(used))
            topk.append(chosen + [7] * (columns - used))  # stale columns that must not be read
            lens.append(used)
    topk_rows = torch.tensor(topk, dtype=torch.int32)
    return Sequences(work, window_keys, compressed_keys, cache, compressed, table, topk_rows, lens)


def expected(
    data: Sequences, q: torch.Tensor, sink: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masked attention over whole sequences for every row of the batch, each (rows, heads, DIM).

    As the images' rule has it, and causal.
    """
    want, causal, row = [], [], 0
    for i, request in enumerate(data.work.requests):
        for position in range(request.total - request.new, request.total):
            seen = [seen_by(request, position, images) for images in (True, False)]
            compressed = data.compressed_keys[i]
            more = [] if compressed is None else [compressed[data.topk[row, : data.topk_lens[row]]]]
            out = {
                keys: attend(
                    q[row], [data.window_keys[i][keys.start : keys.stop], *more], 0.1, sink
                )
                for keys in dict.fromkeys(seen)
            }
            want.append(out[seen[0]])
            causal.append(out[seen[1]])
            row += 1
    return torch.stack(want), torch.stack(causal)


def layer(data: Sequences, ratio: int, sink: torch.Tensor, meta: Any, **more: Any) -> Any:
    return SimpleNamespace(
        compress_ratio=ratio,
        window_size=WINDOW,
        topk_indices_buffer=data.topk,
        scale=0.1,
        attn_sink=sink,
        PREFILL_CHUNK_SIZE=2,
        max_model_len=4096,
        max_num_batched_tokens=4096,
        **more,
    )


def compressed_metadata(data: Sequences, ratio: int, meta: Any) -> Any:
    if ratio == 1:
        return None
    return SimpleNamespace(
        block_table=data.compressed_table,
        block_size=256,
        c128a_prefill_topk_indices=data.topk[meta.num_decode_tokens :],
    )


def worst(found: torch.Tensor, want: torch.Tensor, causal: torch.Tensor) -> dict[str, float]:
    """Largest error, and how far causal attention would have been off: the check's own scale."""
    return {
        "error": float((found.float() - want).abs().max()),
        "causal": float((causal - want).abs().max()),
    }


@contextmanager
def replaced(module: Any, **names: Any) -> Any:
    kept = {name: getattr(module, name) for name in names}
    for name, value in names.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(module, name, value)
