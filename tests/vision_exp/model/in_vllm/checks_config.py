"""Configs, registry and ModelConfig: what a Vision-Exp checkpoint is to vLLM."""

from __future__ import annotations

import copy
import os
import pickle
from typing import Any

import tiny_config
from checks import check, equal, raises
from rig_model import Rig


@check
def the_registry_says_multimodal(rig: Rig) -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    config = rig.vision_model_config
    info, architecture = ModelRegistry.inspect_model_cls(config.architectures, config)
    equal(architecture, "DeepseekV4ForCausalLM")
    equal(info.supports_multimodal, True, "supports_multimodal")
    equal(info.requires_raw_input_tokens, True, "requires_raw_input_tokens")
    equal(info.supports_multimodal_encoder_tp_data, True, "encoder data mode")
    equal(info.supports_multimodal_raw_input_only, False, "raw input only")
    equal(config.is_multimodal_model, True, "is_multimodal_model")
    equal(config.multimodal_config is not None, True, "multimodal_config")
    equal(config.is_mm_prefix_lm, True, "is_mm_prefix_lm")
    equal(config.tokenizer_mode, "deepseek_v4")


@check
def the_class_keeps_its_name_and_the_stock_class_its_attributes(rig: Rig) -> None:
    from vllm.model_executor.model_loader import get_model_cls
    from vllm.models.deepseek_v4 import DeepseekV4ForCausalLM as stock

    vision = get_model_cls(rig.vision_model_config)
    equal(vision.__name__, "DeepseekV4ForCausalLM")
    equal(issubclass(vision, stock), True)
    equal(vision is stock, False)
    equal(hasattr(stock, "supports_multimodal"), False, "stock class")
    equal(get_model_cls(rig.text_model_config) is stock, True, "class of the text checkpoint")


@check
def text_only_and_v41_configs_are_never_taken(rig: Rig) -> None:
    from vllm.transformers_utils.configs.deepseek_v4 import DeepseekV4Config

    from vision_exp.config import is_vision_exp

    def config(**overrides: Any) -> Any:
        return DeepseekV4Config(**tiny_config.vision_config(**overrides))

    v41 = config(vision_config={"depth": 4})
    text = DeepseekV4Config(**tiny_config.text_config())
    zero = config(vision_n_layers=0)
    for one in (v41, text, zero):
        equal(is_vision_exp(one), False)
        for name in ("is_mm_prefix_lm", "image_token_index", "mm_prefix_clamp_sliding_window"):
            equal(hasattr(one, name), False, name)
    equal(v41.rms_norm_eps, 1e-20, "eps of V4.1")
    # Other weights or another name change nothing: an abliterated Vision-Exp is Vision-Exp.
    equal(is_vision_exp(config(_name_or_path="someone/abliterated")), True)


@check
def config_attributes_survive_pickle_and_copy(rig: Rig) -> None:
    config = rig.vision_model_config.hf_config
    for twin in (config, copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        equal(twin.is_mm_prefix_lm, True)
        equal(twin.mm_prefix_clamp_sliding_window, True)
        equal(twin.image_token_index, 129264)
        equal(twin.rms_norm_eps, 1e-6)
        equal(twin.to_dict(), config.to_dict())


@check
def eps_is_forced_unless_kept_and_for_the_draft_too(rig: Rig) -> None:
    from vllm.config.speculative import SpeculativeConfig
    from vllm.transformers_utils.configs.deepseek_v4 import DeepseekV4Config

    draft = SpeculativeConfig.hf_config_override(DeepseekV4Config(**tiny_config.vision_config()))
    equal(draft.architectures, ["DeepSeekV4MTPModel"])
    equal(draft.rms_norm_eps, 1e-6, "draft eps")
    equal(DeepseekV4Config(**tiny_config.text_config(rms_norm_eps=1e-5)).rms_norm_eps, 1e-5)
    os.environ["VISION_EXP_RMS_NORM_EPS"] = "keep"
    try:
        equal(DeepseekV4Config(**tiny_config.vision_config()).rms_norm_eps, 1e-20, "kept")
    finally:
        del os.environ["VISION_EXP_RMS_NORM_EPS"]


@check
def data_mode_is_kept(rig: Rig) -> None:
    config = rig.model_config(rig.vision_folder, mm_encoder_tp_mode="data")
    equal(config.multimodal_config.mm_encoder_tp_mode, "data")


@check
def image_limit_zero_and_language_model_only_are_text_mode(rig: Rig) -> None:
    from vllm.multimodal import MULTIMODAL_REGISTRY

    supports = MULTIMODAL_REGISTRY.supports_multimodal_inputs
    equal(supports(rig.vision_model_config), True, "as served")
    for options in ({"limit_mm_per_prompt": {"image": 0}}, {"language_model_only": True}):
        config = rig.model_config(rig.vision_folder, **options)
        equal(supports(config), False, str(options))
        equal(config.is_mm_prefix_lm, False, f"is_mm_prefix_lm with {options}")


@check
def overrides_decide_too(rig: Rig) -> None:
    from vllm.model_executor.model_loader import get_model_cls

    config = rig.model_config(rig.vision_folder, hf_overrides={"vision_n_layers": 0})
    equal(config.is_multimodal_model, False)
    equal(config.multimodal_config, None)
    equal(get_model_cls(rig.vision_model_config).__name__, "DeepseekV4ForCausalLM")


@check
def a_bad_vision_config_stops_the_start(rig: Rig) -> None:
    for name, bad in (
        ("odd", {"vision_n_heads": 3}),
        ("gone", {"vision_patch_size": None}),
        ("text", {"vision_n_layers": "32"}),
        ("small", {"vision_max_n_token": 4}),
    ):
        folder = rig.checkpoint(f"bad-{name}", **bad)
        with raises(Exception, next(iter(bad))):
            rig.model_config(folder)


@check
def other_ways_to_write_the_same_config_are_served(rig: Rig) -> None:
    from vllm.model_executor.model_loader import get_model_cls

    expected = get_model_cls(rig.vision_model_config)
    native = "DeepseekV4ForConditionalGeneration"
    for name, changes in (
        ("empty", {"vision_config": {}}),
        ("native", {"architectures": [native]}),
        ("float", {"vision_min_pixels": 147456.0}),
    ):
        config = rig.model_config(rig.checkpoint(f"written-{name}", **changes))
        equal(get_model_cls(config), expected, name)
        equal(config.architectures, rig.vision_model_config.architectures, name)
    with raises(RuntimeError, "--hf-overrides", native):
        rig.model_config(rig.vision_folder, hf_overrides={"architectures": [native]})


@check
def options_of_the_processor_are_obeyed_or_stop_the_start(rig: Rig) -> None:
    from vllm.multimodal import MULTIMODAL_REGISTRY

    def budget(**kwargs: Any) -> int:
        config = rig.model_config(rig.vision_folder, mm_processor_kwargs=kwargs)
        return MULTIMODAL_REGISTRY.create_processor(config).info.budgeted({}).max_n_token

    equal(budget(), 384, "tokens of an image")
    equal(budget(max_pixels=100 * 42 * 42), 100, "with max_pixels")
    for wrong in ({"min_pixels": 4}, {"size": {"height": 4}}, {"max_pixels": 4}):
        with raises(RuntimeError, "--mm-processor-kwargs", next(iter(wrong))):
            budget(**wrong)
