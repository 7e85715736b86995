"""Images of a request that cannot be read, without vLLM."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from vision_exp import settings
from vision_exp.chat import images
from vision_exp.chat.rules import ImagePart, RuleError


class Connector:
    """Stands for vLLM's connector, which finds nothing."""

    def fetch_image(self, url: str) -> Any:
        raise OSError(f"404 of {url}")

    async def fetch_image_async(self, url: str) -> Any:
        return self.fetch_image(url)


def load_async(*arguments: Any) -> Any:
    return asyncio.run(images.load_async(*arguments))


@pytest.mark.parametrize("load", [images.load, load_async])
@pytest.mark.parametrize("url", ["http://a/gone.png", "", "data:image/png;base64,"])
def test_only_earlier_images_may_become_notes_and_only_if_asked_for(load, url):
    def found(earlier: bool, unreadable: str) -> Any:
        part = ImagePart("messages[0].content[1]", {"image_url": {"url": url}}, earlier)
        source = images.source_of(part, unreadable)
        return load([source], Connector(), unreadable)[0]

    noted = found(True, "note")
    assert isinstance(noted, images.Unreadable)
    assert noted.reason.startswith("messages[0].content[1]: ")
    for earlier, unreadable in ((False, "note"), (False, "refuse"), (True, "refuse")):
        with pytest.raises(RuleError, match=r"messages\[0\].content\[1\]") as error:
            found(earlier, unreadable)
        assert (f"{settings.UNREADABLE_IMAGES.name}=note" in str(error.value)) == earlier
