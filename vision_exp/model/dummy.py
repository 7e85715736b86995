"""The images that vLLM measures a server's memory with."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from vllm.multimodal.processing import BaseDummyInputsBuilder, ProcessorInputs

from vision_exp.config import VisionConfig
from vision_exp.image.transform import vit_grid_for
from vision_exp.layout import PLACEHOLDER, PLACEHOLDER_ID


class VisionExpDummyInputs(BaseDummyInputsBuilder[Any]):
    """The most expensive legal image, for memory profiling."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return PLACEHOLDER * mm_counts.get("image", 0)

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Mapping[str, Any]
    ) -> dict[str, Any]:
        width, height = most_patches_size(self.info.vision)
        images = self._get_dummy_images(
            width=width,
            height=height,
            num_images=mm_counts.get("image", 0),
            overrides=mm_options.get("image"),
        )
        return {"image": images}

    def get_dummy_processor_inputs(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Mapping[str, Any]
    ) -> ProcessorInputs:
        # As token ids: the text form needs a tokenizer, which skip_tokenizer_init leaves out.
        images = self.get_dummy_mm_data(seq_len, mm_counts, mm_options)
        return ProcessorInputs(
            prompt=[PLACEHOLDER_ID] * mm_counts.get("image", 0),
            mm_data_items=self.info.parse_mm_data(images, validate=False),
        )


@lru_cache(maxsize=4)
def most_patches_size(config: VisionConfig) -> tuple[int, int]:
    """(width, height) in pixels of an image with the most ViT patches: the slowest to encode.

    Not a square: every LLM row costs a NEWLINE token, so wide and low wins, up to the ratio limit.
    Whole cells are enough to search: any other image has no more patches than the cells it touches.
    """
    cell = config.patch_size * config.downsample_ratio
    budget = config.max_n_token
    sizes = (
        (columns * cell, rows * cell)
        for rows in range(1, budget)
        for columns in range(1, budget // rows + 1)
    )

    def patches(size: tuple[int, int]) -> int:
        try:
            height, width = vit_grid_for(*size, config)
        except ValueError:  # some narrow ones have no grid where a cell is one patch
            return 0
        return height * width

    return max(sizes, key=patches)
