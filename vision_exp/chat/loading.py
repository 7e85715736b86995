"""vLLM's loader of images, but for the decoding, which is `image.convert`'s.

vLLM's own asks for the orientation first, for which Pillow decodes a PNG, and drops what goes wrong
then: a damaged one becomes the part before the damage. It also clips 16-bit images to white. Here a
file is decoded once and whole. Fetching, limits and options stay vLLM's.
https://github.com/vllm-project/vllm/blob/v0.29.0/vllm/multimodal/media/image.py (load_bytes)
"""

from __future__ import annotations

import sys
from io import BytesIO
from typing import Any

import vllm.envs as envs
from PIL import Image
from vllm.multimodal.media import ImageMediaIO, MediaConnector, MediaWithBytes

from vision_exp.image.convert import to_rgb
from vision_exp.image.files import mended


class WholeImageIO(ImageMediaIO):  # type: ignore[misc]
    """Decodes image files to upright RGB, on the background that the options ask for."""

    def load_bytes(self, data: bytes) -> Any:
        """An image file as MediaWithBytes. Raises ValueError with the reason if it cannot be."""
        try:
            image = _opener()(BytesIO(mended(data)))
        except OSError as error:
            raise ValueError(f"Failed to load image: {error}") from error
        most = getattr(envs, "VLLM_MAX_IMAGE_PIXELS", 0)
        if 0 < most < image.width * image.height:
            raise ValueError(
                f"Image dimensions {image.width}x{image.height} exceed the maximum of {most} "
                "pixels. Set VLLM_MAX_IMAGE_PIXELS to increase this limit."
            )
        rgb = to_rgb(image, self.rgba_background_color)
        return MediaWithBytes(self._convert_image_mode(rgb), data)


class ImageLoader:
    """A media connector's images. One that fetches in its own way keeps doing so."""

    def __init__(self, connector: Any) -> None:
        self._connector = connector
        options = getattr(connector, "media_io_kwargs", {}).get("image", {})
        self._io = WholeImageIO(**{"image_mode": "RGB", **options})

    def fetch_image(self, url: str) -> Any:
        """The image at a URL (http, https, data or file). Raises what vLLM raises."""
        if self._is_stock("fetch_image"):
            return self._connector.load_from_url(url, self._io, fetch_timeout=_timeout())
        return self._again(self._connector.fetch_image(url))

    async def fetch_image_async(self, url: str) -> Any:
        """Like `fetch_image`."""
        if self._is_stock("fetch_image_async"):
            load = self._connector.load_from_url_async
            return await load(url, self._io, fetch_timeout=_timeout())
        return self._again(await self._connector.fetch_image_async(url))

    def _is_stock(self, name: str) -> bool:
        return getattr(type(self._connector), name) is getattr(MediaConnector, name)

    def _again(self, loaded: Any) -> Any:
        data = getattr(loaded, "original_bytes", b"")
        return self._io.load_bytes(data) if data else loaded


def _opener() -> Any:
    """Pillow's, but for releases that do not open every format that Pillow knows."""
    return getattr(sys.modules[ImageMediaIO.__module__], "open_image", Image.open)


def _timeout() -> Any:
    return envs.VLLM_IMAGE_FETCH_TIMEOUT
