"""What the tower asks of the card that it runs on."""

from __future__ import annotations

from functools import cache, lru_cache

import torch

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.v1.attention.backends.fa_utils:flash_attn_varlen_func",
    "vllm.v1.attention.backends.fa_utils:get_flash_attn_version",
)


@cache
def flash_version() -> int | None:
    """Version of vLLM's FlashAttention for this card; None if there is none."""
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


def processors(device: torch.device) -> int:
    """Multiprocessors of a card; 1 for anything else."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=8)
def on_hopper(device: torch.device) -> bool:
    """Whether this is the kind of card that some kernels are made for or have been tried on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@lru_cache(maxsize=8)
def second_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream for work beside the current one's; whoever uses it joins it again."""
    return torch.cuda.Stream(device)
