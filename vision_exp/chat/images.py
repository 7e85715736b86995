"""Load the images of a request with vLLM's own connector, and say which part is at fault."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from vision_exp.chat.rules import ImagePart, RuleError
from vision_exp.image.values import image_of

_DATA_URL = re.compile(r"data:(?P<type>[^,;]*)(?:;[^,;]*)*?;?base64,", re.IGNORECASE)
_SOURCE_KEYS = ("image_url", "image", "image_pil", "url", "source", "data")
_LONGEST_REASON = 300


@dataclass(frozen=True)
class Source:
    """What an image part refers to: a URL or an object (PIL image, array), or an uuid alone."""

    where: str
    url: str | None
    image: Any
    uuid: str | None


def source_of(image: ImagePart) -> Source:
    """The source of an image part. Raises RuleError if it has none, or one that is not usable."""
    part = image.part
    if part.get("type") == "image_embeds" or "image_embeds" in part:
        raise RuleError(f"{image.where}: precomputed image embeddings are not supported")
    # An empty one names nothing: images under it would be taken for each other.
    uuid = None if part.get("uuid") in (None, "") else str(part["uuid"])
    value = next((part[key] for key in _SOURCE_KEYS if part.get(key) is not None), None)
    if isinstance(value, Mapping):
        value = value.get("url")
    if value is None or (isinstance(value, str) and not value.strip()):
        if uuid is None:
            raise RuleError(f"{image.where}: the image part holds no image")
        return Source(image.where, None, None, uuid)
    if isinstance(value, str):
        return Source(image.where, _tidy(image.where, value.strip()), None, uuid)
    return Source(image.where, None, value, uuid)


def load(sources: Sequence[Source], connector: Any) -> list[Any]:
    """The images in order; None for one that is known by its uuid alone.

    Raises RuleError naming the part for whatever goes wrong with it.
    """
    images = []
    for source in sources:
        try:
            if source.url is None:
                images.append(_as_image(source.image))
            else:
                images.append(connector.fetch_image(source.url))
        except Exception as error:
            raise _failure(source, error) from error
    return images


async def load_async(sources: Sequence[Source], connector: Any) -> list[Any]:
    """Like `load`, all parts at once. Waits for every part before it raises."""

    async def one(source: Source) -> Any:
        try:
            if source.url is None:
                return _as_image(source.image)
            return await connector.fetch_image_async(source.url)
        except Exception as error:
            raise _failure(source, error) from error

    results = await asyncio.gather(*map(one, sources), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _tidy(where: str, url: str) -> str:
    """Data URLs as vLLM wants them: a type, then `;base64`, and no white space in the data."""
    match = _DATA_URL.match(url)
    if match is None:
        return url
    data = url[match.end() :]
    if not data.strip():
        raise RuleError(f"{where}: the image part holds no image (its data URL is empty)")
    if any(space in data for space in " \t\r\n"):
        data = "".join(data.split())
    return f"data:{match['type'] or 'image/unknown'};base64,{data}"


def _as_image(value: Any) -> Any:
    """The object of a part as an image. None, where an uuid stands for it, stays None."""
    if value is None:
        return None
    image = value if isinstance(value, Image.Image) else image_of(value)
    image.load()  # one opened from a file is read only now; a broken one fails here
    return image


def _failure(source: Source, error: Exception) -> RuleError:
    reason = str(error) or type(error).__name__
    reason = re.sub(r"[A-Za-z0-9+/=]{120,}", "...", reason)[:_LONGEST_REASON]
    return RuleError(f"{source.where}: this image cannot be used: {reason}")
