"""Runs the tower over the images of a step, and merges rows into embeddings. No host sync.

Where each rank encodes a part of the images, the hosts tell each other before the rows are
exchanged whether all have done theirs: one small message that overlaps with the device's work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed


class Image(NamedTuple):
    """Patches (n, 3, p, p), their grid and the number of rows that the aligner makes of them."""

    patches: torch.Tensor
    grid: tuple[int, int]
    rows: int


def encode_images(
    model: Any,
    *,
    data_parallel: bool,
    patches: torch.Tensor,
    vit_grid: torch.Tensor,
    llm_grid: torch.Tensor,
    perm: torch.Tensor,
) -> list[torch.Tensor]:
    """Aligner rows of each image, (h * w, hidden), in the order of its IMAGE tokens.

    Grids are (images, 2) on the host. `data_parallel`: each tensor-parallel rank encodes a part of
    the images with its full copy of the tower, and all ranks get all rows.
    """
    grids = [(int(h), int(w)) for h, w in vit_grid.tolist()]
    counts = [h * w for h, w in llm_grid.tolist()]
    pieces = patches.split([h * w for h, w in grids])
    images = [Image(*image) for image in zip(pieces, grids, counts, strict=True)]
    rows = (_run_data_parallel if data_parallel else _run)(model, images)
    return [one.index_select(0, order) for one, order in zip(rows, perm.split(counts), strict=True)]


def _run(model: Any, images: Sequence[Image]) -> list[torch.Tensor]:
    """Raster-order rows of each image, all images packed into one pass."""
    grids = [image.grid for image in images]
    rows = model.vision(torch.cat([image.patches for image in images]), grids)
    return list(model.aligner(rows, grids).split([image.rows for image in images]))


def assign_images(sizes: list[int], ranks: int) -> list[list[int]]:
    """Image numbers for each rank, by vLLM's balance: the same on every rank."""
    from vllm.model_executor.models.vision import get_load_balance_assignment

    order, counts, _loads = get_load_balance_assignment(sizes, ranks)
    remaining = iter(order)
    return [list(islice(remaining, count)) for count in counts]


def _run_data_parallel(model: Any, images: Sequence[Image]) -> list[torch.Tensor]:
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
        tensor_model_parallel_all_gather,
    )

    sizes = [len(image.patches) for image in images]
    assigned = assign_images(sizes, get_tensor_model_parallel_world_size())
    mine = [images[i] for i in assigned[get_tensor_model_parallel_rank()]]
    # Every rank contributes a block of the same height, padded below.
    height = max(sum(images[i].rows for i in numbers) for numbers in assigned)
    block = model.image_start.new_zeros((height, model.config.hidden_size))
    with raise_on_all_ranks():
        if mine:
            rows = torch.cat(_run(model, mine))
            block[: len(rows)] = rows
    gathered = tensor_model_parallel_all_gather(block, dim=0)
    result: list[torch.Tensor] = [gathered] * len(images)
    for rank, numbers in enumerate(assigned):
        start = rank * height
        for index in numbers:
            result[index] = gathered[start : start + images[index].rows]
            start += images[index].rows
    return result


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
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
