"""Load the images of a request with vLLM's own connector, and say which part is at fault."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from PIL import Image

from vision_exp import settings
from vision_exp.chat.rules import ImagePart, RuleError
from vision_exp.image.values import image_of

_DATA_URL = re.compile(r"data:(?P<type>[^,;]*)(?:;[^,;]*)*?;?base64,", re.IGNORECASE)
_SOURCE_KEYS = ("image_url", "image", "image_pil", "url", "source", "data")
_LONGEST_REASON = 300


@dataclass(frozen=True)
class Source:
    """What an image part refers to: a URL or an object (PIL image, array), or an uuid alone.

    `earlier`: as in ImagePart.
    """

    where: str
    url: str | None
    image: Any
    uuid: str | None
    earlier: bool = False


@dataclass(frozen=True)
class Unreadable:
    """Stands for an image of an earlier turn that is left out of the prompt."""

    reason: str


def source_of(image: ImagePart, unreadable: str = "refuse") -> Source:
    """The source of an image part. Raises RuleError if it has none, or one that is not usable.

    `unreadable`: as in Policy; with "note" an earlier image's source may be an Unreadable.
    """
    try:
        return replace(_source(image), earlier=image.earlier)
    except RuleError as error:
        source = Source(image.where, None, None, None, image.earlier)
        return replace(source, image=_failed(source, error, unreadable))


def _source(image: ImagePart) -> Source:
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
            files = "; a file_id is not supported, this server keeps no files"
            hint = files if part.get("file_id") else ""
            raise RuleError(f"{image.where}: the image part holds no image{hint}")
        return Source(image.where, None, None, uuid)
    if isinstance(value, str):
        return Source(image.where, _tidy(image.where, value.strip()), None, uuid)
    return Source(image.where, None, value, uuid)


def load(sources: Sequence[Source], connector: Any, unreadable: str = "refuse") -> list[Any]:
    """The images in order; None for one that is known by its uuid alone.

    Raises RuleError naming the part for whatever goes wrong with it. `unreadable`: as in Policy;
    with "note" an earlier image that cannot be used is an Unreadable instead.
    """
    images = []
    for source in sources:
        try:
            if source.url is None:
                images.append(_as_image(source.image))
            else:
                images.append(connector.fetch_image(source.url))
        except Exception as error:  # noqa: BLE001  decoders raise anything; named or noted below
            images.append(_failed(source, error, unreadable))
    return images


async def load_async(
    sources: Sequence[Source], connector: Any, unreadable: str = "refuse"
) -> list[Any]:
    """Like `load`, all parts at once. Waits for every part before it raises."""

    async def one(source: Source) -> Any:
        try:
            if source.url is None:
                return _as_image(source.image)
            return await connector.fetch_image_async(source.url)
        except Exception as error:  # noqa: BLE001  as in `load`
            return _failed(source, error, unreadable)

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
    if value is None or isinstance(value, Unreadable):
        return value
    image = value if isinstance(value, Image.Image) else image_of(value)
    image.load()  # one opened from a file is read only now; a broken one fails here
    return image


def _failed(source: Source, error: Exception, unreadable: str) -> Unreadable:
    """What stands for an image that cannot be used. Raises RuleError naming it, if nothing does."""
    reason = str(error)
    if not isinstance(error, RuleError):
        reason = re.sub(r"[A-Za-z0-9+/=]{120,}", "...", reason or type(error).__name__)
        reason = f"{source.where}: this image cannot be used: {reason[:_LONGEST_REASON]}"
    if not source.earlier:
        raise RuleError(reason) from error
    if unreadable == "refuse":
        raise RuleError(
            f"{reason} (It is of an earlier turn: leave it out, or start the server with "
            f"{settings.UNREADABLE_IMAGES.name}=note, which puts a text note in its place.)"
        ) from error
    return Unreadable(reason)
