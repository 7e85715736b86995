"""Runs the tower over the images of a step, and merges rows into embeddings. No host sync.

Where ranks share out images, the hosts tell each other before the rows are exchanged whether each
of them has its share: one small message that overlaps with the device's work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.distributed.parallel_state:get_tp_group",
    "vllm.distributed.parallel_state:GroupCoordinator.cpu_group",
    "vllm.distributed.parallel_state:get_tensor_model_parallel_rank",
    "vllm.distributed.parallel_state:get_tensor_model_parallel_world_size",
    "vllm.distributed.communication_op:tensor_model_parallel_all_gather(input_, dim)",
)


def encode_images(
    model: Any,
    *,
    spread: bool,
    patches: torch.Tensor,
    vit_grid: torch.Tensor,
    llm_grid: torch.Tensor,
    perm: torch.Tensor,
) -> list[torch.Tensor]:
    """Aligner rows of each image, (h * w, hidden), in the order of its IMAGE tokens.

    Grids are (images, 2) on the host. `spread`: each tensor-parallel rank encodes a share of the
    images with its full copy of the tower, and all ranks get all rows.
    """
    grids = [(int(h), int(w)) for h, w in vit_grid.tolist()]
    counts = [h * w for h, w in llm_grid.tolist()]
    pieces = patches.split([h * w for h, w in grids])
    rows = (_spread if spread else _run)(model, pieces, grids, counts)
    return [one.index_select(0, order) for one, order in zip(rows, perm.split(counts), strict=True)]


def _run(
    model: Any,
    pieces: Sequence[torch.Tensor],
    grids: Sequence[tuple[int, int]],
    counts: Sequence[int],
) -> list[torch.Tensor]:
    """Raster-order rows of each image, all images packed into one pass."""
    rows = model.vision(torch.cat(tuple(pieces)), grids)
    return list(model.aligner(rows, grids).split(list(counts)))


def shares(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Image numbers for each rank: largest first, each to the rank with the least work."""
    loads = [0] * ranks
    given: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = loads.index(min(loads))
        given[rank].append(index)
        loads[rank] += sizes[index]
    return given


def _spread(
    model: Any,
    pieces: Sequence[torch.Tensor],
    grids: Sequence[tuple[int, int]],
    counts: Sequence[int],
) -> list[torch.Tensor]:
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
        tensor_model_parallel_all_gather,
    )

    sizes = [len(piece) for piece in pieces]
    given = shares(sizes, get_tensor_model_parallel_world_size())
    mine = given[get_tensor_model_parallel_rank()]
    # Every rank contributes a block of the same height, padded below.
    height = max(sum(counts[i] for i in share) for share in given)
    hidden = model.config.hidden_size
    block = model.image_start.new_zeros((height, hidden))
    with _on_all_ranks():
        if mine:
            rows = torch.cat(
                _run(
                    model,
                    [pieces[i] for i in mine],
                    [grids[i] for i in mine],
                    [counts[i] for i in mine],
                )
            )
            block[: len(rows)] = rows
    gathered = tensor_model_parallel_all_gather(block, dim=0)
    result: list[torch.Tensor] = [gathered] * len(pieces)
    for rank, share in enumerate(given):
        start = rank * height
        for index in share:
            result[index] = gathered[start : start + counts[index]]
            start += counts[index]
    return result


@contextmanager
def _on_all_ranks() -> Iterator[None]:
    """Raise on every tensor-parallel rank if the body fails on one: RuntimeError on the others.

    Otherwise a rank that fails would leave the others in the collective that follows.
    """
    from vllm.distributed.parallel_state import get_tp_group

    failed = torch.zeros(1, dtype=torch.int32)
    try:
        yield
    except Exception:
        torch.distributed.all_reduce(failed.fill_(1), group=get_tp_group().cpu_group)
        raise
    torch.distributed.all_reduce(failed, group=get_tp_group().cpu_group)
    if failed:
        raise RuntimeError("another rank could not encode its share of the images")


def merge_rows(embeds: torch.Tensor, rows: Any, is_multimodal: torch.Tensor | None) -> torch.Tensor:
    """`embeds` (tokens, hidden) with the k-th marked row replaced by the k-th of `rows`.

    `rows`: tensor or sequence of tensors, (n, hidden) in all. `is_multimodal`: bool (tokens,), on
    the host or the device; neither is waited for. ValueError if a mask on the host does not mark
    n rows; on the device that cannot be seen without waiting.
    """
    if is_multimodal is None:
        raise ValueError("image embeddings need the mask of their positions")
    flat = rows.flatten(0, -2) if isinstance(rows, torch.Tensor) else torch.cat(tuple(rows))
    if is_multimodal.device.type == "cpu":
        marked = int(is_multimodal.sum())
        if marked != len(flat):
            raise ValueError(f"{len(flat)} image embeddings for {marked} positions")
    if not len(flat):
        return embeds
    mask = is_multimodal.to(embeds.device, non_blocking=True)
    source = (mask.cumsum(0) - 1).clamp(0, len(flat) - 1)
    picked = flat.to(embeds.dtype).index_select(0, source)
    return torch.where(mask.unsqueeze(-1), picked, embeds)
