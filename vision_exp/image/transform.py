"""An image to the patches that the vision tower reads.

**What goes in.** Any PIL image; convert.py makes it upright RGB. Size and pixels are then those of
the reference, `load_image` of
https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/models/deepseek_v4/common/mm_preprocess.py

**Size.** The size search works on the size with its width capped at ``max_wh_ratio`` times the
height and its area raised to ``min_pixels``. If the block of that size exceeds the token budget,
the largest size of about that ratio is solved for, with a budget lowered until the result fits.

**Pixels.** Wide images are stretched, others are fitted and centred on grey, as Pillow does it
with its default filters: equal bits need equal Pillow versions. A channel has 256 values, and each
becomes the bfloat16 of ``(x / 255 - 0.5) / 0.5``. See pixels.py for how, and backend.py for what
makes it several times as fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from PIL import Image

from vision_exp.config import VisionConfig
from vision_exp.image.backend import current_backend
from vision_exp.image.convert import to_rgb
from vision_exp.image.pixels import patches_of
from vision_exp.layout import GROUP, unpadded_length

_MOST_THREADS = 8


@dataclass(frozen=True)
class ImagePatches:
    """``patches``: bfloat16 (h * w, 3, p, p), row by row; ``vit_grid`` (h, w) counts patches,
    ``llm_grid`` (h, w) counts rows and columns of language-model tokens."""

    patches: torch.Tensor
    vit_grid: tuple[int, int]
    llm_grid: tuple[int, int]


def image_to_patches(image: Image.Image, config: VisionConfig) -> ImagePatches:
    """Transform one image. Raises ValueError with the reason, whatever is wrong with it."""
    rgb = to_rgb(image)
    height, width = vit_grid_for(rgb.width, rgb.height, config)
    stretch = rgb.width >= config.max_wh_ratio * rgb.height
    return ImagePatches(
        patches=patches_of(
            rgb, (height, width), config.patch_size, current_backend(), stretch=stretch
        ),
        vit_grid=(height, width),
        llm_grid=llm_grid_of((height, width), config),
    )


def images_to_patches(
    images: Sequence[Image.Image], config: VisionConfig, threads: int | None = None
) -> list[ImagePatches]:
    """image_to_patches of each, in order, on a few threads (nearly all work needs no GIL).

    An image that comes twice is transformed once: two threads cannot decode it at the same time.
    Raises the ValueError of the first bad image; its message begins with ``image INDEX: ``.
    """

    def one(item: tuple[int, Image.Image]) -> ImagePatches:
        index, image = item
        try:
            return image_to_patches(image, config)
        except ValueError as error:
            raise ValueError(f"image {index}: {error}") from error

    distinct: dict[int, tuple[int, Image.Image]] = {}
    for index, image in enumerate(images):
        distinct.setdefault(id(image), (index, image))
    workers = min(len(distinct), threads or torch.get_num_threads(), _MOST_THREADS)
    if workers <= 1:
        patches = list(map(one, distinct.values()))
    else:
        with ThreadPoolExecutor(workers, thread_name_prefix="vision-exp-image") as pool:
            patches = list(pool.map(one, distinct.values()))
    done = dict(zip(distinct, patches, strict=True))
    return [done[id(image)] for image in images]


def vit_grid_for(width: int, height: int, config: VisionConfig) -> tuple[int, int]:
    """Grid (h, w), in patches, of an upright image of ``width`` x ``height`` pixels.

    Its block fits ``max_n_token`` at every start position. Raises ValueError if none does.
    """
    patch, budget = config.patch_size, config.max_n_token - (GROUP - 1)
    wide: float = min(width, height * config.max_wh_ratio)
    high: float = height
    if wide * high < config.min_pixels:
        scale = (config.min_pixels / (wide * high)) ** 0.5
        wide, high = int(wide * scale), int(high * scale)
    grid = (math.ceil(high / patch), math.ceil(wide / patch))
    attempt = budget
    while unpadded_length(llm_grid_of(grid, config)) > budget:
        grid = _solve(wide, high, attempt, config)
        attempt -= 1
        if min(grid) < 1:  # rounded away: only far smaller budgets than the checkpoint's do this
            raise ValueError(
                f"no grid for {width}x{height} pixels fits vision_max_n_token {config.max_n_token}"
            )
    return grid


def llm_grid_of(vit_grid: tuple[int, int], config: VisionConfig) -> tuple[int, int]:
    """Grid in language-model tokens: the patch grid over the downsample ratio, rounded up."""
    ratio = config.downsample_ratio
    return -(-vit_grid[0] // ratio), -(-vit_grid[1] // ratio)


def _solve(wide: float, high: float, budget: int, config: VisionConfig) -> tuple[int, int]:
    """Largest patch grid of about the ratio ``high / wide`` whose rows and newlines, START and
    END take about ``budget`` tokens: ``h (w + 1) + 2 = budget`` solved for w, h an even number
    (the reference's `solve_resize_ratio`)."""
    ratio, cell = high / wide, config.downsample_ratio
    columns = math.sqrt((budget - 2) / ratio + 0.25) - 0.5
    rows = columns * ratio
    if columns < 1:
        return (budget - 2) // 2 // 2 * 2 * cell, cell
    if rows < 2:
        return 2 * cell, ((budget - 2) // 2 - 1) * cell
    patch, step = config.patch_size, config.patch_size * cell
    scale = min(
        math.floor(columns) * step / wide,
        math.floor(rows) // 2 * 2 * step / high,
    )
    return math.floor(high * scale / patch), math.floor(wide * scale / patch)
