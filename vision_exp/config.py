"""The vision part of a checkpoint's configuration, read once and checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

MODEL_TYPE = "deepseek_v4"
ARCHITECTURE = "DeepseekV4ForCausalLM"
#: What vLLM from 0.30 on calls the model with its tower. Earlier releases, which know that ending
#: for others, take it for ARCHITECTURE here and there, but not everywhere.
NATIVE_ARCHITECTURE = "DeepseekV4ForConditionalGeneration"

#: The smallest budget that still holds one column of two rows, its newlines, START, END and pads.
MIN_BUDGET = 9


class VisionConfigError(RuntimeError):
    """A checkpoint's vision config or tokenizer that this overlay cannot serve.

    No ValueError: vLLM takes those from a processing info for "no images" and goes on text-only.
    """


def is_vision_exp(hf_config: object) -> bool:
    """Whether a HF config belongs to a checkpoint with the Vision-Exp tower.

    Text-only DeepSeek-V4 has no ``vision_n_layers`` or 0. DeepSeek-V4.1 nests a ``vision_config``
    and follows other rules, so it is never taken; an empty one says nothing. A ``vision_n_layers``
    of another kind counts as vision: VisionConfig.from_hf_config then names it, instead of the
    tower silently going missing.
    """
    return getattr(hf_config, "model_type", None) == MODEL_TYPE and is_vision_exp_or_draft(
        hf_config
    )


def is_vision_exp_or_draft(hf_config: object) -> bool:
    """True also for what vLLM makes of such a config for an MTP draft, where model_type differs.

    Only where the config is a DeepSeek-V4 one anyway, as in the layers of its models.
    """
    return getattr(hf_config, "vision_config", None) in (None, {}) and getattr(
        hf_config, "vision_n_layers", None
    ) not in (None, 0)


@dataclass(frozen=True)
class VisionConfig:
    """Sizes and limits of the tower, the aligner and the image transform.

    Lengths are in pixels (``patch_size``, ``min_pixels``), patches (``downsample_ratio``) or tokens
    (``max_n_token``, leading pads included). ``max_wh_ratio`` is infinite where the checkpoint sets
    no limit. ``hidden_size`` is the language model's width.
    """

    n_layers: int
    dim: int
    n_heads: int
    inter_dim: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_n_token: int
    min_pixels: float
    max_wh_ratio: float
    hidden_size: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @classmethod
    def from_hf_config(cls, hf_config: object) -> VisionConfig:
        """Read a HF config (attributes). Raises ValueError that names the key it cannot use."""

        def number(key: str, least: float, kind: Any = (int, float), what: str = "a number") -> Any:
            value = getattr(hf_config, key, None)
            if value is None:
                raise ValueError(f"config.json: {key} is missing")
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ValueError(f"config.json: {key} must be {what}, got {value!r}")
            if not least <= value < math.inf:  # nor NaN
                raise ValueError(f"config.json: {key} must be at least {least:g}, got {value!r}")
            return value

        def integer(key: str, least: int) -> int:
            return number(key, least, int, "a whole number")

        unlimited = getattr(hf_config, "vision_max_wh_ratio", "missing") is None
        min_pixels = number("vision_min_pixels", 1)
        config = cls(
            n_layers=integer("vision_n_layers", 1),
            dim=integer("vision_dim", 1),
            n_heads=integer("vision_n_heads", 1),
            inter_dim=integer("vision_inter_dim", 1),
            patch_size=integer("vision_patch_size", 1),
            rope_theta=number("vision_rope_theta", 1.0),
            downsample_ratio=integer("vision_downsample_ratio", 1),
            max_n_token=integer("vision_max_n_token", MIN_BUDGET),
            # 147456.0 is 147456 to the hash of an image as well.
            min_pixels=int(min_pixels) if min_pixels == int(min_pixels) else min_pixels,
            max_wh_ratio=math.inf if unlimited else number("vision_max_wh_ratio", 1.0),
            hidden_size=integer("hidden_size", 1),
        )
        if config.dim % config.n_heads:
            raise ValueError(
                f"config.json: vision_dim {config.dim} is no multiple of "
                f"vision_n_heads {config.n_heads}"
            )
        if config.head_dim % 4:
            # Rotary pairs (i, i + head_dim / 2): one half turns by row, the other by column.
            raise ValueError(
                f"config.json: vision_dim / vision_n_heads = {config.head_dim} "
                "is no multiple of 4, as the two-dimensional rotary embedding needs"
            )
        return config


def read_config(hf_config: Any) -> VisionConfig:
    """The vision part of a Vision-Exp config. Raises VisionConfigError naming the bad key."""
    try:
        return VisionConfig.from_hf_config(hf_config)
    except ValueError as error:
        raise VisionConfigError(f"vision config of this checkpoint: {error}") from error
