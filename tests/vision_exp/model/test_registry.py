"""Which checkpoints are multimodal: the registry's decisions, without a registry."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_config

from vision_exp.config import VisionConfigError
from vision_exp.model import registry

OURS, NATIVE = "DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration"


def config(limit: int | None = None, **overrides: Any) -> Any:
    """A model's config; `limit` images a prompt, None: no multimodal config at all."""
    multimodal = None if limit is None else SimpleNamespace(get_limit_per_prompt=lambda _: limit)
    hf_config = SimpleNamespace(**tiny_config.vision_config(**overrides))
    return SimpleNamespace(hf_config=hf_config, multimodal_config=multimodal)


@pytest.mark.parametrize(
    ("architecture", "layers", "ours"),
    [(OURS, 2, True), (OURS, 0, False), ("DeepSeekV4MTPModel", 2, False), (NATIVE, 0, False)],
)
def test_whose_answer_is_another(architecture: str, layers: int, ours: bool) -> None:
    assert registry.is_ours(architecture, config(vision_n_layers=layers)) is ours


def test_natives_name_of_the_architecture_is_refused() -> None:
    with pytest.raises(VisionConfigError, match=f"--hf-overrides.*write {OURS}"):
        registry.is_ours(NATIVE, config())


@pytest.mark.parametrize(
    ("limit", "layers", "off"),
    [(0, 2, True), (1, 2, False), (32, 2, False), (None, 2, False), (0, 0, False)],
)
def test_text_mode(limit: int | None, layers: int, off: bool) -> None:
    assert registry.images_off(config(limit, vision_n_layers=layers)) is off


@dataclass(frozen=True)
class Info:
    """Of a release that knows one answer less."""

    supports_multimodal: bool = False
    requires_raw_input_tokens: bool = False
    supports_pp: bool = True


def test_the_answer_and_a_config_that_cannot_be_served() -> None:
    assert registry.multimodal_info(Info(), config()) == Info(True, True, True)
    with pytest.raises(VisionConfigError, match="vision_dim is missing"):
        registry.multimodal_info(Info(), config(vision_dim=None))
