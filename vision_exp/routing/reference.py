"""`mm_topk` in plain PyTorch: what the kernel has to compute, and what runs without a GPU."""

from __future__ import annotations

import torch

MAX_TOP_K = 8

#: From this many rows on the kernel cuts its work otherwise.
MANY_ROWS = 4096


def mm_topk_reference(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    bias_vl: torch.Tensor,
    image_mask: torch.Tensor,
    *,
    top_k: int,
    scale: float,
    tid2eid: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `mm_topk` computes, in plain PyTorch and in `dtype`: (weights float32, ids int64)."""
    scores = biased = torch.nn.functional.softplus(logits.to(dtype)).sqrt()
    image = image_mask.unsqueeze(-1)
    if tid2eid is not None:
        biased = scores + bias_vl.to(dtype)
    elif bias is not None:
        biased = scores + torch.where(image, bias_vl, bias).to(dtype)
    biased = torch.where(biased.isnan(), float("-inf"), biased)
    ids = torch.sort(biased, dim=-1, descending=True, stable=True).indices[:, :top_k]
    if tid2eid is not None and token_ids is not None:
        rows = token_ids.long().clamp(0, tid2eid.shape[0] - 1)
        ids = torch.where(image, ids, tid2eid[rows].long())
    chosen = scores.gather(-1, ids)
    total = chosen.sum(-1, keepdim=True)
    weights = chosen * (scale / torch.where(total > 0, total, 1.0))
    return weights.float(), ids
