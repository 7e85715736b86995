"""A request's images as plain RGB, and what their hashes are made of.

vLLM's parser turns and converts each PIL image, which copies it even if it is upright and RGB, and
does so again for those that no cache has. Here `to_rgb` turns and converts them, with the same
result, and an upright RGB image is read where it is: in fresh memory, a copy took 0.4 to 2.6 ms
of 1036x588, most of it page faults. So nobody may draw in it between its hash and its patches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from PIL import Image
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataParser

from vision_exp.config import VisionConfig
from vision_exp.image import raw
from vision_exp.image.backend import warm_up
from vision_exp.image.convert import to_rgb
from vision_exp.image.transform import vit_grid_for
from vision_exp.image.values import image_of

#: Bytes that are hashed at once, about. Part of an image's hash: with another number all change.
#: More of them take the GIL from other threads for longer, fewer have to wait for it more often.
PIECE = 1 << 20


class ImageParser(MultiModalDataParser):  # type: ignore[misc]
    """vLLM's parser, but `normalize_images` is left to convert PIL images, alone or in a list."""

    def _parse_image_data(self, data: Any) -> Any:
        alone = isinstance(data, Image.Image) or (isinstance(data, np.ndarray) and data.ndim == 2)
        if alone:
            return ImageProcessorItems([data])
        several = isinstance(data, (list, tuple))
        # Beside a PIL image nothing can be an embedding.
        if several and (not data or any(isinstance(one, Image.Image) for one in data)):
            return ImageProcessorItems(list(data))
        return super()._parse_image_data(data)


class HashedPixels(list):  # type: ignore[type-arg]
    """A plain image's bytes for vLLM's hasher, which goes through lists item by item.

    They are made while it does, one piece after another: as `Image.tobytes` makes them, an image
    takes its size again, and longer than hashing.
    """

    def __init__(self, image: Image.Image) -> None:
        super().__init__()
        self.image = image

    def __iter__(self) -> Iterator[bytes | memoryview]:
        length = 3 * self.image.width
        rows = raw.rows_in(PIECE, length)
        if warm_up().kernels is not None:
            return raw.pieces(self.image, "RGB", rows)
        # The same pieces where Pillow's encoder is not known: hashes are compared across processes.
        whole, step = memoryview(self.image.tobytes()), length * rows
        return (whole[at : at + step] for at in range(0, len(whole), step))


class NormalizedImages(ImageProcessorItems):  # type: ignore[misc]
    """Images in plain RGB, hashed by their size and pixels.

    ``uuids``: those of the request, None where it has none; who has one is not hashed.
    """

    def __init__(self, images: list[Image.Image | None], uuids: Sequence[str | None]) -> None:
        super().__init__(images)
        self.uuids = uuids

    def get_item_for_hash(self, index: int) -> Any:
        image = self.get(index)
        if image is None or self.uuids[index] is not None:
            return None
        return (*image.size, HashedPixels(image))


def normalize_images(
    items: Any, uuids: Sequence[str | None] | None, config: VisionConfig
) -> NormalizedImages:
    """The same images, upright and RGB, so that hashes cover exactly what is processed.

    vLLM hashes the encoded bytes of a downloaded image, though what they decode to depends on
    the request's media_io_kwargs (background of transparent images). Images known by their uuid
    alone stay None. Raises VLLMValidationError with the image's number for one that no grid fits
    or that is none, and for embeddings.
    """
    if not isinstance(items, ImageProcessorItems):
        raise VLLMValidationError(
            "precomputed image embeddings are not supported", parameter="image"
        )
    images: list[Image.Image | None] = []
    for index in range(len(items)):
        try:
            images.append(_normalize(items.get(index), config))
        except (AttributeError, TypeError, ValueError) as error:
            raise VLLMValidationError(f"image {index}: {error}", parameter="image") from error
    return NormalizedImages(images, uuids or [None] * len(images))


def _normalize(item: Any, config: VisionConfig) -> Image.Image | None:
    if item is None:
        return None
    image = to_rgb(item if isinstance(item, Image.Image) else image_of(item))
    vit_grid_for(*image.size, config)
    return image
