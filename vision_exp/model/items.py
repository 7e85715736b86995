"""A request's images as plain RGB pictures, and what their hashes are made of.

vLLM's parser turns and converts each PIL image, which copies it even if it is upright and RGB, and
does so again for those that no cache has. Here `to_rgb` turns and converts them, with the same
result, and an upright RGB picture is read where it is: in fresh memory, a copy took 0.4 to 2.6 ms
of 1036x588, most of it page faults. So nobody may draw in it between its hash and its patches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from PIL import Image
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataParser

from vision_exp.config import VisionConfig
from vision_exp.image import raw
from vision_exp.image.backend import warm_up
from vision_exp.image.transform import to_rgb, vit_grid_for

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.exceptions:VLLMValidationError.__init__(message, parameter)",
    "vllm.multimodal.parse:ImageProcessorItems.__init__",
    "vllm.multimodal.parse:ImageProcessorItems.get",
    "vllm.multimodal.parse:ImageProcessorItems.get_item_for_hash(index)",
    "vllm.multimodal.parse:MultiModalDataParser.__init__",
    "vllm.multimodal.parse:MultiModalDataParser._parse_image_data(data)",
)

#: Bytes that are hashed at once, about. Part of a picture's hash: with another number all change.
#: More of them take the GIL from other threads for longer, fewer have to wait for it more often.
PIECE = 1 << 20


class PictureParser(MultiModalDataParser):  # type: ignore[misc]
    """vLLM's parser, but PIL images, alone or in a list, stay as they are: `plain_pictures` sees to
    them."""

    def _parse_image_data(self, data: Any) -> Any:
        pictures = [data] if isinstance(data, Image.Image) else data
        if isinstance(pictures, list) and all(isinstance(one, Image.Image) for one in pictures):
            return ImageProcessorItems(pictures)
        return super()._parse_image_data(data)


class Pixels(list):  # type: ignore[type-arg]
    """A plain picture's bytes for vLLM's hasher, which goes through lists item by item.

    They are made while it does, one piece after another: as `Image.tobytes` makes them, a picture
    takes its size again, and longer than hashing.
    """

    def __init__(self, picture: Image.Image) -> None:
        super().__init__()
        self.picture = picture

    def __iter__(self) -> Iterator[bytes | memoryview]:
        length = 3 * self.picture.width
        rows = raw.rows_in(PIECE, length)
        if warm_up().kernels is not None:
            return raw.pieces(self.picture, "RGB", rows)
        # The same pieces where Pillow's encoder is not known: hashes are compared across processes.
        whole, step = memoryview(self.picture.tobytes()), length * rows
        return (whole[at : at + step] for at in range(0, len(whole), step))


class Pictures(ImageProcessorItems):  # type: ignore[misc]
    """Plain RGB pictures, hashed by their size and pixels.

    ``uuids``: those of the request, None where it has none; who has one is not hashed.
    """

    def __init__(self, pictures: list[Image.Image | None], uuids: Sequence[str | None]) -> None:
        super().__init__(pictures)
        self.uuids = uuids

    def get_item_for_hash(self, index: int) -> Any:
        picture = self.get(index)
        if picture is None or self.uuids[index] is not None:
            return None
        return (*picture.size, Pixels(picture))


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
        try:
            pictures.append(_plain(items.get(index), config))
        except (AttributeError, TypeError, ValueError) as error:
            raise VLLMValidationError(f"image {index}: {error}", parameter="image") from error
    return Pictures(pictures, uuids or [None] * len(pictures))


def _plain(item: Any, config: VisionConfig) -> Image.Image | None:
    if item is None:
        return None
    if isinstance(item, torch.Tensor):
        item = item.numpy(force=True)
    picture = to_rgb(item if isinstance(item, Image.Image) else Image.fromarray(item))
    vit_grid_for(*picture.size, config)
    return picture
