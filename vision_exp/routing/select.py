"""Experts for a layer's rows in a step with image rows: image rows choose with `bias_vl`.

A step without image rows takes vLLM's own router, untouched. In a step with image rows, known on
the host (engine/context.py), every layer's selection is `mm_topk`, on ROCm that of its image rows,
with the image mask made from the token ids that the layer itself receives: they are cut and padded
together with its rows, also under sequence parallelism. Where a layer cannot have the ids of its
rows, start-up is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from vision_exp import layout
from vision_exp.engine import context
from vision_exp.routing.reference import MANY_ROWS
from vision_exp.routing.topk import mm_topk

BIAS_VL = "e_score_correction_bias_vl"


class MissingTokenIds(RuntimeError):
    """Image rows reached a layer without the token ids that tell them from text rows."""


def is_mixed(moe: Any) -> bool:
    """True if `moe` must tell image rows from text rows in the forward pass now running."""
    return (
        context.current().has_image_rows
        and getattr(moe.gate, BIAS_VL, None) is not None
        and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
    )


def check_ids(moe: Any, rows: torch.Tensor, input_ids: torch.Tensor | None) -> torch.Tensor:
    """`input_ids` if there is one for each of `rows`, else MissingTokenIds."""
    if input_ids is None:
        raise MissingTokenIds(f"[vision-exp] {moe.prefix} got image rows without token ids")
    if input_ids.shape != rows.shape[:1]:
        raise MissingTokenIds(
            f"[vision-exp] {moe.prefix} got {rows.shape[0]} rows with {input_ids.shape[0]} ids"
        )
    return input_ids


def _image_mask(input_ids: torch.Tensor) -> torch.Tensor:
    """Which rows are image rows; made once for all layers of a forward pass.

    A forward pass hands one tensor of ids to all of its layers.
    """
    last = context.current().image_mask
    if last is None or last[0] is not input_ids:
        last = input_ids, layout.image_token_mask(input_ids)
        context.publish(image_mask=last)
    return last[1]


def note_entry(moe: Any) -> None:
    """Note that `moe` runs in this step; `route` notes that it chose its experts."""
    seen = context.current().seen
    if seen is not None:
        seen.entered.add(id(moe))


def route(
    moe: Any,
    logits: torch.Tensor,
    input_ids: torch.Tensor | None,
    indices_type: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights float32, expert ids) of `mm_topk` for the rows of `moe`.

    logits (rows, experts), input_ids (rows,). Expert ids are `indices_type`, int32 if None.
    Raises MissingTokenIds without one token id per row.
    """
    token_ids = check_ids(moe, logits, input_ids)
    wanted = indices_type or torch.int32
    mask = _image_mask(token_ids)
    seen = context.current().seen
    if seen is not None:
        seen.routed[id(moe)] = mask
    weights, ids = mm_topk(
        logits,
        moe.gate.e_score_correction_bias,
        getattr(moe.gate, BIAS_VL),
        mask,
        top_k=moe.n_activated_experts,
        scale=moe.routed_scaling_factor,
        tid2eid=moe.gate.tid2eid,
        token_ids=token_ids,
        ids_dtype=torch.int64 if wanted == torch.int64 else torch.int32,
    )
    return weights, ids.to(wanted)


def replace_image_rows(
    moe: Any,
    logits: torch.Tensor,
    input_ids: torch.Tensor | None,
    stock: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """`stock`, which is what vLLM's router chose for all rows, with image rows as by `route`.

    Text rows keep every bit of their (weights, expert ids). Raises MissingTokenIds as `route` does.
    """
    chosen = route(moe, logits, input_ids, stock[1].dtype)
    image = _image_mask(check_ids(moe, logits, input_ids)).unsqueeze(1)
    weights, ids = map(partial(torch.where, image), chosen, stock)
    return weights.to(stock[0].dtype), ids


def warm_up(layers: Iterable[Any]) -> None:
    """Route in a layer of each kind, few rows and many: compiles before the first request."""
    kinds = {(moe.gate.tid2eid is not None, moe.use_mega_moe): moe for moe in layers}
    for moe, rows in itertools.product(kinds.values(), (1, MANY_ROWS)):
        device = getattr(moe.gate, BIAS_VL).device
        logits = torch.zeros(rows, moe.n_routed_experts, device=device)
        token_ids = torch.zeros(rows, dtype=moe.hash_indices_dtype, device=device)
        route(moe, logits, token_ids, moe.hash_indices_dtype)
