"""SwiGLU inside the matrix product that makes its gate and up rows, by QuACK.

QuACK's product (https://github.com/Dao-AILab/quack, a dependency of vLLM) applies it to its own
sums: at 3,135 rows 50 microseconds instead of 66 for cuBLAS and a kernel after it (H200), and gate
and up are not rounded before they meet. Where QuACK is missing or its result differs, and with
VISION_EXP_TOWER_QUACK=0, cuBLAS multiplies and fused.swiglu follows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F

from vision_exp import settings

#: Largest relative distance of a trial from the exact result; BF16 rounds by up to 2 ** -9.
_TRIAL_ERROR = 2**-8

logger = logging.getLogger("vllm.vision_exp")

#: x (n, k) and the weight (2 m, k) of gate rows, then up rows, to silu(gate) * up (n, m).
GatedLinear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def select(device: torch.device) -> GatedLinear | None:
    """One kernel for product and SwiGLU of BF16 matrices; None where there is none."""
    return _tried(device) if settings.TOWER_QUACK.is_on() else None


@cache
def _tried(device: torch.device) -> GatedLinear | None:
    begun = time.perf_counter()
    try:
        product = _quack()
        error = trial(product, device)
    except Exception as reason:  # noqa: BLE001  a compiler of its own: slower without, not wrong
        kind = type(reason).__name__
        logger.warning("[vision-exp] the tower runs without QuACK: %s: %s", kind, reason)
        return None
    if not error <= _TRIAL_ERROR:
        logger.warning("[vision-exp] the tower runs without QuACK: its trial is off by %.2g", error)
        return None
    seconds = time.perf_counter() - begun
    logger.info("[vision-exp] the tower multiplies by QuACK, ready in %.1f s", seconds)
    return product


def _quack() -> GatedLinear:
    from quack.gemm_interface import gemm_gated

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((x.shape[0], weight.shape[0] // 2))
        gemm_gated(
            x,
            weight.t(),
            activation="swiglu",
            postact_out=out,
            store_preact=False,
            tuned=False,  # trying its kernels out takes minutes; its first choice is the best here
            concat_layout=("B",),  # all gate rows, then all up rows
        )
        return out

    return product


def trial(product: GatedLinear, device: torch.device) -> float:
    """Relative distance from float64 for random matrices of uneven sizes; compiles the kernel."""
    random = torch.Generator(device).manual_seed(0)
    made: dict[str, Any] = {"device": device, "generator": random}
    x = torch.randn(300, 128, **made).bfloat16()
    weight = torch.randn(2 * 352, 128, **made).mul_(128**-0.5).bfloat16()
    gate, up = F.linear(x.double(), weight.double()).chunk(2, dim=-1)
    exact = F.silu(gate) * up
    return float((product(x, weight).double() - exact).norm() / exact.norm())
