"""Full attention inside each image on a GPU: vLLM's FlashAttention and torch's own.

Each `Kind` is one way to compute the same; trial.py finds out which is right and fastest here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate

import torch
from torch.nn import functional as F

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.config.attention:AttentionConfig.flash_attn_version optional",
    "vllm.config:get_current_vllm_config_or_none",
    "vllm.v1.attention.backends.fa_utils:{flash_attn_varlen_func, get_flash_attn_version, "
    "is_fa_version_supported(fa_version), is_flash_attn_varlen_func_available} optional",
)

#: qkv (n, 3, heads, d) of packed images and the rows of each, to (n, heads * d).
AttendPacked = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
#: qkv (n, 3, heads, d) to (n, heads * d).
Attend = Callable[[torch.Tensor], torch.Tensor]
#: cu_seqlens_k [0, length] of one image in n rows, int32 on the device, to the attention of all
#: blocks. Rows from `length` on are nobody's keys.
ImageAttention = Callable[[torch.Tensor], Attend]


@dataclass(frozen=True)
class Kind:
    """``packed`` attends images one after the other; ``image(rows, heads, device)`` is for CUDA
    graphs: one image in so many rows, whose length comes from the device."""

    name: str
    packed: AttendPacked
    image: Callable[[int, int, torch.device], ImageAttention]


#: In the place of a version: the FlashAttention that vLLM finds on ROCm, which has none.
ROCM = 0


@dataclass(frozen=True)
class Flash:
    """vLLM's FlashAttention: the versions to try here; ``asked``: its config names this one."""

    versions: tuple[int, ...] = ()
    asked: bool = False


def available_flash() -> Flash:
    """What vLLM has for this GPU. To be asked in vLLM's config context, as it builds a model."""
    try:
        from vllm.config import get_current_vllm_config_or_none
        from vllm.v1.attention.backends.fa_utils import (
            flash_attn_varlen_func,  # noqa: F401  (missing where there is none)
            get_flash_attn_version,
            is_fa_version_supported,
        )
    except ImportError:
        return Flash()
    version = get_flash_attn_version()
    if version is None:
        return Flash((ROCM,)) if torch.version.hip and _on_rocm() else Flash()
    config = get_current_vllm_config_or_none()
    if config is not None and config.attention_config.flash_attn_version is not None:
        return Flash((version,), asked=True)
    return Flash((version, 2) if version != 2 and is_fa_version_supported(2) else (version,))


def _on_rocm() -> bool:
    from vllm.v1.attention.backends.fa_utils import is_flash_attn_varlen_func_available

    return bool(is_flash_attn_varlen_func_available())


@lru_cache(maxsize=128)
def on_device(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Int32 numbers on the device, copied there once and without waiting. Not to be written."""
    host = torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def cu_seqlens(seqlens: Sequence[int], device: torch.device) -> torch.Tensor:
    """Row numbers at which the images begin, and the end: int32 (images + 1,)."""
    return on_device((0, *accumulate(seqlens)), device)


def flash(
    version: int,
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
        # Its own choice of splits splits small images and takes half as long again.
        **({} if version == ROCM else {"fa_version": version, "num_splits": 1}),
        **options,
    )
    return out


def flash_packed(version: int, qkv: torch.Tensor, seqlens: Sequence[int]) -> torch.Tensor:
    """Full attention inside each image: (n, 3, heads, d) to (n, heads * d)."""
    cu, longest = cu_seqlens(seqlens, qkv.device), max(seqlens)
    return flash(version, qkv, cu, cu, (longest, longest)).flatten(1)


def flash_image(version: int, rows: int, heads: int, device: torch.device) -> ImageAttention:
    """Attention of one image of at most ``rows`` rows, all of which are computed."""
    queries = cu_seqlens((rows,), device)
    return lambda keys: lambda qkv: flash(version, qkv, queries, keys, (rows, rows)).flatten(1)


def flash_kind(version: int) -> Kind:
    """vLLM's FlashAttention of this version."""
    packed, image = partial(flash_packed, version), partial(flash_image, version)
    return Kind(f"FlashAttention {version or 'of ROCm'}", packed, image)


def torch_packed(qkv: torch.Tensor, seqlens: Sequence[int]) -> torch.Tensor:
    """Full attention inside each image: (n, 3, heads, d) to (n, heads * d)."""
    parts = [_torch_attention(rows) for rows in qkv.split(list(seqlens))]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _torch_attention(qkv: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    q, k, v = qkv.permute(1, 2, 0, 3)[:, None].unbind(0)  # (1, heads, n, d)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return out[0].transpose(0, 1).flatten(1)


def torch_image(rows: int, heads: int, device: torch.device) -> ImageAttention:
    """Attention of one image of at most ``rows`` rows: a bias of minus infinity hides the keys
    behind its last one, so that they weigh exactly nothing."""
    # Rows of whole 16 values, which torch's kernels ask of a bias; else each block copies it.
    numbers = torch.arange(-(-rows // 16) * 16, device=device)

    def of(keys: torch.Tensor) -> Attend:
        biases: list[torch.Tensor] = []  # made once for all blocks, where it is captured

        def attend(qkv: torch.Tensor) -> torch.Tensor:
            if not biases:
                hidden = torch.zeros_like(numbers, dtype=qkv.dtype)
                hidden.masked_fill_(numbers >= keys[1], -torch.inf)
                biases.append(hidden[:rows].expand(1, 1, rows, rows))
            return _torch_attention(qkv, biases[0])

        return attend

    return of


TORCH = Kind("torch", torch_packed, torch_image)


def varlen_packed(qkv: torch.Tensor, seqlens: Sequence[int]) -> torch.Tensor:
    """Full attention inside each image: (n, 3, heads, d) to (n, heads * d)."""
    cu, longest = cu_seqlens(seqlens, qkv.device), max(seqlens)
    return _varlen(qkv, cu, cu, longest)


def varlen_image(rows: int, heads: int, device: torch.device) -> ImageAttention:
    """Attention of one image of at most ``rows`` rows, all of which are computed."""
    queries = cu_seqlens((rows,), device)
    return lambda keys: lambda qkv: _varlen(qkv, queries, keys, rows)


def _varlen(
    qkv: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, longest: int
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn  # from torch 2.10

    out = varlen_attn(*qkv.unbind(1), cu_seqlens_q, cu_seqlens_k, longest, longest)
    return torch.as_tensor(out).flatten(1)


#: The FlashAttention 2 that torch brings, for images whose length comes from the device.
VARLEN = Kind("torch's FlashAttention", varlen_packed, varlen_image)
