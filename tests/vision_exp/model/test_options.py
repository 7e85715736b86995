"""`mm_processor_kwargs`, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tiny_config

from vision_exp.config import VisionConfig
from vision_exp.image.transform import llm_grid_of, vit_grid_for
from vision_exp.layout import block_length
from vision_exp.model.options import lowered

CONFIG = VisionConfig.from_hf_config(SimpleNamespace(**tiny_config.vision_config()))
CELL = 42 * 42


@pytest.mark.parametrize("kwargs", [{}, {"max_pixels": None}, {"max_pixels": 10**9}])
def test_the_checkpoint_sets_the_most(kwargs):
    assert lowered(CONFIG, kwargs) == CONFIG


@pytest.mark.parametrize("tokens", [9, 12, 50, 200, 383])
def test_max_pixels_is_the_most_that_an_image_has_afterwards(tokens):
    most = tokens * CELL + 1
    config = lowered(CONFIG, {"max_pixels": most})
    assert config.max_n_token == tokens
    assert lowered(CONFIG, {"images_kwargs": {"max_pixels": most}}) == config
    for size in ((1, 1), (60, 44), (4000, 3000), (30, 4000), (4000, 30)):
        grid = vit_grid_for(*size, config)
        assert grid[0] * grid[1] * 14 * 14 <= most
        assert block_length(llm_grid_of(grid, config), 0) <= tokens


@pytest.mark.parametrize(
    "kwargs",
    [
        {"min_pixels": 4},
        {"size": {"longest_edge": 100}},
        {"max_pixels": 100_000, "do_resize": False},
        {"images_kwargs": {"size": 3}},
        {"images_kwargs": 3},
    ],
)
def test_what_is_not_known_is_named(kwargs):
    unknown = next(key for key in kwargs if key != "max_pixels")
    with pytest.raises(ValueError, match=f"mm_processor_kwargs.*{unknown}|'size'"):
        lowered(CONFIG, kwargs)


@pytest.mark.parametrize("most", [0, -1, 9 * CELL - 1, 1e6, "100000", True])
def test_a_wrong_number_is_named(most):
    with pytest.raises(ValueError, match="max_pixels must be a whole number of at least 15876"):
        lowered(CONFIG, {"max_pixels": most})
