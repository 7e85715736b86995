"""Which checkpoints are multimodal, by their config, and what vLLM's registry says of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from vision_exp.config import (
    ARCHITECTURE,
    NATIVE_ARCHITECTURE,
    VisionConfigError,
    is_vision_exp,
    read_config,
)

_ANSWERS = {
    "supports_multimodal": True,
    "requires_raw_input_tokens": True,
    # Without it ModelConfig turns --mm-encoder-tp-mode data into weights, with a warning only.
    "supports_multimodal_encoder_tp_data": True,
}


def is_ours(architecture: str, model_config: Any) -> bool:
    """Whether the registry's answer for this architecture and config is to be another.

    Raises VisionConfigError for native vLLM's name of the architecture, which can only be there by
    `--hf-overrides` (a config has lost it, see install.py): vLLM would go on text-only.
    """
    vision = is_vision_exp(model_config.hf_config)
    if vision and architecture == NATIVE_ARCHITECTURE:
        raise VisionConfigError(
            f"--hf-overrides names the architecture {architecture}, which this vLLM takes for "
            f"text-only: leave it out, or write {ARCHITECTURE}"
        )
    return vision and architecture == ARCHITECTURE


def multimodal_info(info: Any, model_config: Any) -> Any:
    """vLLM's model info, saying "multimodal". Raises VisionConfigError for a bad vision config."""
    read_config(model_config.hf_config)
    known = {field.name for field in dataclasses.fields(info)}
    return dataclasses.replace(info, **{k: v for k, v in _ANSWERS.items() if k in known})


def images_off(model_config: Any) -> bool:
    """Whether a Vision-Exp checkpoint is served in text mode (image limit 0)."""
    multimodal = model_config.multimodal_config
    return (
        is_vision_exp(model_config.hf_config)
        and multimodal is not None
        and multimodal.get_limit_per_prompt("image") == 0
    )
