"""An image to the patches that the vision tower reads.

**What goes in.** Any PIL image. Three things are done as vLLM's own loader does them
(https://github.com/vllm-project/vllm/blob/v0.29.0/vllm/multimodal/image.py), so that an image gives
the same patches as a data URL, a file or a PIL object; a second time they change nothing:

- EXIF orientation (tags 2 to 8) is applied before the size is looked at. A tag that cannot be read
  leaves the image as stored.
- Transparency (RGBA, LA, PA, or a transparent colour of any other mode but RGB) is composited on
  white. Another background chosen with ``--media-io-kwargs`` has been applied by vLLM before.
- Every other mode goes through Pillow's ``convert("RGB")``. Of an animation, the current frame
  (the first, unless the caller moved it) is taken.

Size and pixels are those of the reference, `load_image` of
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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from PIL import ExifTags, Image, ImageOps

from vision_exp.config import VisionConfig
from vision_exp.image.backend import current_backend
from vision_exp.image.pixels import patches_of, pillow_errors
from vision_exp.layout import GROUP, unpadded_length

_WHITE = (255, 255, 255)

#: Copies of the decoded image that may exist at once, in bytes. An RGB image of the largest
#: size that Pillow opens (179 million pixels, 4 bytes each) still passes: it needs no second copy.
MAX_WORKING_BYTES = 768 << 20

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


def to_rgb(image: Image.Image) -> Image.Image:
    """Upright RGB version of an image (itself if it is one). Raises ValueError with the reason."""
    if not isinstance(image, Image.Image):
        raise ValueError(f"expected a PIL image, got {type(image).__name__}")
    if not image.width or not image.height:
        raise ValueError(f"the picture is empty ({image.width}x{image.height})")
    with pillow_errors("decoded"):
        copies = (image.mode != "RGB") + _has_alpha(image)
        _check_size(image, copies)
        # Before its orientation is looked for: that decodes a PNG as well, and of a damaged one a
        # second decoding gives the part before the damage without a word.
        image.load()
        if _or_else(lambda: image.getexif().get(ExifTags.Base.Orientation), 1) in range(2, 9):
            _check_size(image, copies + 1)
            image = _or_else(lambda: ImageOps.exif_transpose(image), image)
        if image.mode == "RGB":
            return image
        if not _has_alpha(image):  # decoding may have found the transparent colour only now
            return image.convert("RGB")
        layer = image if image.mode == "RGBA" else image.convert("RGBA")
        ground = Image.new("RGB", layer.size, _WHITE)
        ground.paste(layer, mask=layer.getchannel("A"))
        return ground


def _has_alpha(image: Image.Image) -> bool:
    """Whether any of the image may be transparent. Of RGB, a transparent colour does not count."""
    marked = image.mode != "RGB" and "transparency" in image.info
    return marked or image.mode in ("RGBA", "LA", "PA")


def _or_else(read: Callable[[], Any], otherwise: Any) -> Any:
    """What ``read`` gives; ``otherwise`` where Pillow fails, which vLLM's loader does not mind."""
    try:
        return read()
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  whatever is wrong with the orientation: as stored
        return otherwise


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


def _check_size(image: Image.Image, copies: int) -> None:
    """Refuse an image whose conversion would hold too many bytes at once."""
    stored = 1 if image.mode in ("1", "L", "P") else 2 if image.mode.startswith("I;16") else 4
    need = image.width * image.height * (stored + 4 * copies)
    if need > MAX_WORKING_BYTES:
        raise ValueError(
            f"a {image.width}x{image.height} picture of mode {image.mode} takes {need >> 20} MiB "
            f"to convert, more than {MAX_WORKING_BYTES >> 20}; make it smaller or plain RGB"
        )
