"""Full attention inside each image on a GPU: vLLM's FlashAttention, else torch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import accumulate

import torch
from torch.nn import functional as F

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.v1.attention.backends.fa_utils:{flash_attn_varlen_func, get_flash_attn_version} optional",
)

#: qkv (n, 3, heads, d) of packed images and the rows of each, to (n, heads * d).
AttendPacked = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
#: qkv (n, 3, heads, d) to (n, heads * d).
Attend = Callable[[torch.Tensor], torch.Tensor]
#: cu_seqlens_k [0, length] of one image in n rows, int32 on the device, to the attention of all
#: blocks. Rows from `length` on are nobody's keys.
ImageAttention = Callable[[torch.Tensor], Attend]


@cache
def flash_version() -> int | None:
    """Version of vLLM's FlashAttention for this GPU; None if there is none."""
    try:
        from vllm.v1.attention.backends.fa_utils import (
            flash_attn_varlen_func,  # noqa: F401  (missing where there is none)
            get_flash_attn_version,
        )
    except ImportError:
        return None
    version: int | None = get_flash_attn_version()
    return version


@lru_cache(maxsize=128)
def on_device(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Int32 numbers on the device, copied there once and without waiting. Not to be written."""
    host = torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def cu_seqlens(seqlens: Sequence[int], device: torch.device) -> torch.Tensor:
    """Row numbers at which the images begin, and the end: int32 (images + 1,)."""
    return on_device((0, *accumulate(seqlens)), device)


def flash(
    qkv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlens: tuple[int, int],
    rows: int | None = None,
    **options: torch.Tensor,
) -> torch.Tensor:
    """FlashAttention of packed qkv (n, 3, heads, d), of all rows or the first ones, over all keys.

    ``max_seqlens`` of queries and of keys.
    """
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    q, k, v = qkv.unbind(1)
    out: torch.Tensor = flash_attn_varlen_func(
        q=q[:rows],
        k=k,
        v=v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlens[0],
        max_seqlen_k=max_seqlens[1],
        causal=False,
        fa_version=flash_version(),
        num_splits=1,  # its own choice splits small images and takes half as long again
        **options,
    )
    return out


def flash_packed(qkv: torch.Tensor, seqlens: Sequence[int]) -> torch.Tensor:
    """Full attention inside each image: (n, 3, heads, d) to (n, heads * d)."""
    cu, longest = cu_seqlens(seqlens, qkv.device), max(seqlens)
    return flash(qkv, cu, cu, (longest, longest)).flatten(1)


def flash_image(rows: int, heads: int, device: torch.device) -> ImageAttention:
    """Attention of one image of at most ``rows`` rows, all of which are computed."""
    queries = cu_seqlens((rows,), device)
    return lambda keys: lambda qkv: flash(qkv, queries, keys, (rows, rows)).flatten(1)


def torch_packed(qkv: torch.Tensor, seqlens: Sequence[int]) -> torch.Tensor:
    """Full attention inside each image: (n, 3, heads, d) to (n, heads * d)."""
    parts = []
    for rows in qkv.split(list(seqlens)):
        q, k, v = rows.permute(1, 2, 0, 3)[:, None].unbind(0)  # (1, heads, n, d)
        parts.append(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
