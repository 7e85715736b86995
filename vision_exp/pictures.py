"""A request's images to plain RGB pictures, copied no more often than needed.

vLLM's parser turns and converts every PIL image, which copies even one that is upright and RGB, and
parses images that no cache has a second time. `to_rgb` does the same work, with the same result,
and gives back the picture itself where there is none to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import ExifTags, Image
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataParser

from vision_exp import raw_pixels
from vision_exp.config import VisionConfig
from vision_exp.image import to_rgb, vit_grid_for
from vision_exp.pixels import warm

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.exceptions:VLLMValidationError.__init__(message, parameter)",
    "vllm.multimodal.parse:ImageProcessorItems.__init__",
    "vllm.multimodal.parse:ImageProcessorItems.get",
    "vllm.multimodal.parse:ImageProcessorItems.get_item_for_hash(index)",
    "vllm.multimodal.parse:MultiModalDataParser.__init__",
    "vllm.multimodal.parse:MultiModalDataParser._parse_image_data(data)",
)


class PictureParser(MultiModalDataParser):  # type: ignore[misc]
    """vLLM's parser, which leaves PIL images as they are: `plain_pictures` sees to them."""

    def _parse_image_data(self, data: Any) -> Any:
        pictures = [data] if isinstance(data, Image.Image) else data
        if isinstance(pictures, list) and all(isinstance(one, Image.Image) for one in pictures):
            return ImageProcessorItems(pictures)
        return super()._parse_image_data(data)


class Pictures(ImageProcessorItems):  # type: ignore[misc]
    """Plain RGB pictures, hashed by their size and pixels.

    vLLM's own way to the pixels has Pillow make pieces and join them, which takes as long as
    hashing. It stays for one with an ImageID, which is then its identity, and where pixels are
    prepared the plain way. ``uuids``: those of the request; whoever has one is not hashed.
    """

    def __init__(self, pictures: list[Image.Image | None], uuids: Sequence[str | None]) -> None:
        super().__init__(pictures)
        self.uuids = uuids

    def get_item_for_hash(self, index: int) -> Any:
        picture = self.get(index)
        if picture is None or self.uuids[index] is not None or warm().kernels is None:
            return picture
        if ExifTags.Base.ImageID in picture.getexif():
            return picture
        return (*picture.size, raw_pixels.rgb(picture))


def plain_pictures(
    items: Any, uuids: Sequence[str | None] | None, config: VisionConfig
) -> Pictures:
    """The same images as plain RGB pictures, so that hashes cover exactly what is processed.

    vLLM hashes the encoded bytes of a downloaded image, though what they decode to depends on
    the request's media_io_kwargs (background of transparent images). Images known by their uuid
    alone stay None. Raises VLLMValidationError with the image's number for one that no grid fits
    or that is no picture, and for embeddings.
    """
    if not isinstance(items, ImageProcessorItems):
        raise VLLMValidationError(
            "precomputed image embeddings are not supported", parameter="image"
        )
    pictures: list[Image.Image | None] = []
    for index in range(len(items)):
        item = items.get(index)
        if isinstance(item, torch.Tensor):
            item = item.numpy(force=True)
        try:
            if item is not None:
                item = to_rgb(item if isinstance(item, Image.Image) else Image.fromarray(item))
                vit_grid_for(*item.size, config)
        except (TypeError, ValueError) as error:
            raise VLLMValidationError(f"image {index}: {error}", parameter="image") from error
        pictures.append(item)
    return Pictures(pictures, uuids or [None] * len(pictures))
