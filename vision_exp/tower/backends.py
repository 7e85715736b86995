"""What a GPU's tower is made of; the one place that asks whether the GPU is a Hopper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from vision_exp.tower import attention, hopper
from vision_exp.tower.hopper import swiglu, waves


@dataclass(frozen=True)
class Backend:
    """``attend_image`` makes the attention of one image in so many rows and heads, for CUDA graphs;
    None: no graphs. ``gated_linear``: product and SwiGLU in one kernel, if there is one. ``pdl``:
    whether kernels use programmatic dependent launch."""

    attend: attention.AttendPacked = attention.torch_packed
    attend_image: Callable[[int, int, torch.device], attention.ImageAttention] | None = None
    gated_linear: swiglu.GatedLinear | None = None
    pdl: bool = False


def select(device: torch.device) -> Backend:
    """The fastest parts for a GPU."""
    version, on_hopper = attention.flash_version(), hopper.available(device)
    backend = Backend(pdl=on_hopper, gated_linear=swiglu.select(device) if on_hopper else None)
    if version is None:
        return backend
    if on_hopper and version == waves.FLASH_VERSION:
        return replace(backend, attend=waves.attend, attend_image=waves.attend_image)
    return replace(backend, attend=attention.flash_packed, attend_image=attention.flash_image)
