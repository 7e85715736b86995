from __future__ import annotations

from types import SimpleNamespace

import pytest
import tiny_config

from vision_exp.config import VisionConfig, VisionConfigError, is_vision_exp, read_config
from vision_exp.image.transform import vit_grid_for


def hf(**overrides):
    return SimpleNamespace(**tiny_config.vision_config(**overrides))


def test_reads_every_key():
    config = VisionConfig.from_hf_config(hf(vision_dim=1024, vision_n_heads=16, hidden_size=4096))
    assert (config.n_layers, config.dim, config.n_heads, config.head_dim) == (2, 1024, 16, 64)
    assert (config.inter_dim, config.patch_size, config.rope_theta) == (192, 14, 10000.0)
    assert (config.downsample_ratio, config.max_n_token, config.min_pixels) == (3, 384, 147456)
    assert (config.max_wh_ratio, config.hidden_size) == (8, 4096)


@pytest.mark.parametrize(
    ("overrides", "vision"),
    [
        ({}, True),
        ({"architectures": ["DeepseekV4ForCausalLM"], "_name_or_path": "abliterated"}, True),
        ({"vision_n_layers": "32"}, True),  # named by from_hf_config, not taken for text-only
        ({"vision_n_layers": 0}, False),
        ({"vision_n_layers": None}, False),
        ({"vision_config": {"depth": 24}}, False),
        ({"vision_config": {}}, True),
        ({"model_type": "deepseek_v4_1"}, False),
        ({"model_type": "deepseek_v3"}, False),
    ],
)
def test_is_vision_exp(overrides, vision):
    assert is_vision_exp(hf(**overrides)) is vision


def test_text_checkpoint_and_other_objects_are_not_vision():
    assert not is_vision_exp(SimpleNamespace(**tiny_config.text_config()))
    assert not is_vision_exp(object())


def test_numbers_as_json_writers_put_them():
    config = VisionConfig.from_hf_config(hf(vision_min_pixels=147456.0))
    assert repr(config) == repr(VisionConfig.from_hf_config(hf()))  # hashes are made of it
    null = hf()
    null.vision_max_wh_ratio = None
    unlimited = VisionConfig.from_hf_config(null)
    assert unlimited.max_wh_ratio == float("inf")
    assert vit_grid_for(42 * 12, 42, unlimited)[1] > vit_grid_for(42 * 12, 42, config)[1]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vision_n_layers", 0),
        ("vision_n_layers", -1),
        ("vision_n_layers", "32"),
        ("vision_n_layers", True),
        ("vision_n_layers", 2.0),
        ("vision_dim", 0),
        ("vision_dim", 130),  # 65 per head
        ("vision_dim", 132),  # 66 per head
        ("vision_n_heads", 3),
        ("vision_n_heads", 10),  # 12.8 per head
        ("vision_inter_dim", None),
        ("vision_patch_size", -14),
        ("vision_rope_theta", 0),
        ("vision_rope_theta", "10000"),
        ("vision_rope_theta", float("nan")),
        ("vision_rope_theta", float("inf")),
        ("vision_downsample_ratio", 0),
        ("vision_max_n_token", 8),
        ("vision_min_pixels", 0),
        ("vision_max_wh_ratio", 0.5),
        ("vision_max_wh_ratio", None),
        ("hidden_size", None),
    ],
)
def test_a_bad_key_is_named(key, value):
    said = f"config.json: {key} is missing" if value is None else key
    with pytest.raises(ValueError, match=said):
        VisionConfig.from_hf_config(hf(**{key: value}))
    # vLLM takes a ValueError for "no images", and goes on text-only.
    with pytest.raises(VisionConfigError, match=said):
        read_config(hf(**{key: value}))


def test_what_stops_a_start_is_no_value_error():
    assert not issubclass(VisionConfigError, ValueError)
