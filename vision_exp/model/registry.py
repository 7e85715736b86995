"""Decides per config whether a DeepSeek-V4 checkpoint is multimodal, in vLLM's registry's answers.

vLLM's class `DeepseekV4ForCausalLM` serves text-only checkpoints too, so its attributes stay stock.
For the config of a Vision-Exp checkpoint the registry answers with a subclass and with a model info
that says "multimodal"; for every other config it answers what it always did. The `modelinfos` disk
cache holds the stock answer in both cases and cannot go stale.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

from vision_exp import patching
from vision_exp.config import is_vision_exp, read_config

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.model_executor.models.registry:"
    "_ModelRegistry.inspect_model_cls(architectures, model_config)",
    "vllm.model_executor.models.registry:"
    "_ModelRegistry.resolve_model_cls(architectures, model_config)",
    "vllm.model_executor.models.registry:_ModelInfo.supports_multimodal",
    "vllm.model_executor.models.registry:_ModelInfo.requires_raw_input_tokens",
    "vllm.model_executor.models.registry:_ModelInfo.supports_multimodal_encoder_tp_data",
    "vllm.config.model:ModelConfig.is_mm_prefix_lm",
    "vllm.config.model:ModelConfig.hf_config",
    "vllm.config.model:ModelConfig.multimodal_config",
    "vllm.config.multimodal:MultiModalConfig.get_limit_per_prompt(modality)",
)

ARCHITECTURE = "DeepseekV4ForCausalLM"

_ANSWERS = {
    "supports_multimodal": True,
    "requires_raw_input_tokens": True,
    # Without it ModelConfig turns --mm-encoder-tp-mode data into weights, with a warning only.
    "supports_multimodal_encoder_tp_data": True,
}


def install() -> None:
    """Wrap the registry's two answers. Idempotent; imports nothing."""
    patching.when_imported("vllm.model_executor.models.registry", _wrap_registry)
    patching.when_imported("vllm.config.model", _wrap_model_config)


def _wrap_registry(module: ModuleType) -> None:
    patching.wrap(module._ModelRegistry, "inspect_model_cls", _inspect_model_cls)
    patching.wrap(module._ModelRegistry, "resolve_model_cls", _resolve_model_cls)


def _wrap_model_config(module: ModuleType) -> None:
    """Text mode (image limit 0) is no prefix-LM; before 0.27 vLLM does not see that itself."""
    found: Any = module.ModelConfig.is_mm_prefix_lm  # a property up to 0.24, then a cached one
    stock: Any = found.fget if isinstance(found, property) else found.func

    def is_mm_prefix_lm(self: Any) -> bool:
        return stock(self) and not images_off(self)

    module.ModelConfig.is_mm_prefix_lm = property(is_mm_prefix_lm, doc=stock.__doc__)


def images_off(model_config: Any) -> bool:
    """Whether a Vision-Exp checkpoint is served in text mode."""
    multimodal = model_config.multimodal_config
    return (
        is_vision_exp(model_config.hf_config)
        and multimodal is not None
        and multimodal.get_limit_per_prompt("image") == 0
    )


def _inspect_model_cls(original: Any, self: Any, architectures: Any, model_config: Any) -> Any:
    info, architecture = original(self, architectures, model_config)
    if architecture == ARCHITECTURE and is_vision_exp(model_config.hf_config):
        read_config(model_config.hf_config)
        known = {field.name for field in dataclasses.fields(info)}
        info = dataclasses.replace(info, **{k: v for k, v in _ANSWERS.items() if k in known})
    return info, architecture


def _resolve_model_cls(original: Any, self: Any, architectures: Any, model_config: Any) -> Any:
    model_class, architecture = original(self, architectures, model_config)
    if architecture == ARCHITECTURE and is_vision_exp(model_config.hf_config):
        from vision_exp.model.model import vision_class

        model_class = vision_class(model_class)
    return model_class, architecture
