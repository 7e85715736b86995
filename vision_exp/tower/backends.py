"""What a GPU's tower is made of; the one place that asks whether the GPU is a Hopper."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vision_exp.tower import attention, hopper, split_kv
from vision_exp.tower.attention import TORCH, Flash, Kind
from vision_exp.tower.hopper import swiglu, waves


@dataclass(frozen=True)
class Backend:
    """``gated_linear``: product and SwiGLU in one kernel, if there is one. ``pdl``: whether kernels
    use programmatic dependent launch."""

    attention: Kind = TORCH
    gated_linear: swiglu.GatedLinear | None = None
    pdl: bool = False


def select(device: torch.device, kind: Kind = TORCH) -> Backend:
    """The fastest parts for a GPU, with this attention."""
    on_hopper = hopper.available(device)
    return Backend(kind, swiglu.select(device) if on_hopper else None, pdl=on_hopper)


def kinds(device: torch.device, flash: Flash) -> list[Kind]:
    """Every kind of attention that this GPU may have, what is known to be good first.

    Where vLLM's config names a version of FlashAttention, that one alone.
    """
    of_flash = [_flash_kind(device, version) for version in flash.versions]
    return of_flash if flash.asked else [*of_flash, *split_kv.kinds(), attention.VARLEN, TORCH]


def _flash_kind(device: torch.device, version: int) -> Kind:
    full_waves = version == waves.FLASH_VERSION and hopper.available(device)
    return waves.KIND if full_waves else attention.flash_kind(version)
