"""Full attention inside each picture on a GPU: vLLM's FlashAttention, else torch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch.nn import functional as F

from vision_exp.tower import flash
from vision_exp.tower.device import flash_version, on_device

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = ("vllm.v1.attention.backends.fa_utils:flash_attn_varlen_func",)

#: qkv (n, 3, heads, d) and the rows of each picture, to (n, heads * d).
Attend = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]


def best() -> Attend:
    """Attention of packed pictures: vLLM's FlashAttention where it is there, else torch's own."""
    version = flash_version()
    if version is None:
        return by_torch
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    def flash_attention(qkv: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        edges = _edges(lengths, qkv.device)
        if len(lengths) == 1:
            return flash.for_one(lengths[0], qkv.shape[2], qkv.device)(edges)(qkv)
        q, k, v = qkv.unbind(1)
        out = flash_attn_varlen_func(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=edges,
            cu_seqlens_k=edges,
            max_seqlen_q=max(lengths),
            max_seqlen_k=max(lengths),
            causal=False,
            fa_version=version,
            num_splits=1,  # its own choice splits small pictures and takes half as long again
        )
        return out.flatten(1)

    return flash_attention


def _edges(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Row numbers at which the pictures begin, and the end: int32 (pictures + 1,)."""
    return on_device((0, *accumulate(lengths)), device)


def by_torch(qkv: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Full attention inside each picture: (n, 3, heads, d) to (n, heads * d)."""
    parts = []
    for rows in qkv.split(list(lengths)):
        q, k, v = rows.permute(1, 2, 0, 3)[:, None].unbind(0)  # (1, heads, n, d)
        parts.append(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
