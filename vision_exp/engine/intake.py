"""Images between the front end and the engine: what the engine has changes when it is told.

vLLM notes an image as known to the engine while it processes the prompt. A request that ends
between that and the engine (a bad parameter, a client that hangs up, a count of tokens) then leaves
a note that is wrong, and later requests with the same image fail. Here processing only prepares:
the images stay in the front end, in a cache of the size that vLLM documents for it
(`mm_processor_cache_gb`, once per API server and once per engine). vLLM's own sender cache, which
mirrors the engine's, is asked and updated where a request is encoded for the engine, in the order
of sending and for every request. Whatever ends before that has changed nothing.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

#: Where a client of the engine core keeps the ImageCache of its front end.
FIELD = "vision_exp_images"


class ImageCache:
    """A multimodal processor cache as vLLM's processor and renderer use it.

    ``prepared``: vLLM's processor-only cache, holding what was processed. ``sender``: vLLM's cache
    that mirrors the engine's or writes to its shared memory; None where the engine has none.
    """

    def __init__(self, prepared: Any, sender: Any | None = None) -> None:
        self.prepared = prepared
        self.sender = sender
        self._found: dict[str, Any] = {}
        # Requests are sent by the event loop, while another thread may clear the caches.
        self._sending = threading.Lock()

    def is_cached(self, mm_hashes: list[str]) -> list[bool]:
        """Which of a prompt's images need not be processed."""
        # Held until they are asked for: in a small cache, the prompt's other images evict them.
        self._found = {
            key: self.prepared.get_and_update_item(None, key)
            for key in mm_hashes
            if self.prepared.is_cached_item(key)
        }
        return [key in self._found for key in mm_hashes]

    def is_cached_item(self, mm_hash: str) -> bool:
        """Whether an image need not be processed."""
        return self.prepared.is_cached_item(mm_hash)

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Make an image the last to be evicted."""
        self.prepared.touch_sender_cache_item(mm_hash)

    def get_and_update_item(self, mm_item: Any | None, mm_hash: str) -> Any:
        """(item, prompt updates) of an image, with its data; kept if it is given."""
        if mm_item is None and mm_hash in self._found:
            return self._found[mm_hash]
        return self.prepared.get_and_update_item(mm_item, mm_hash)

    def make_stats(self, *, delta: bool = False) -> Any:
        """Hits and queries of processing."""
        return self.prepared.make_stats(delta=delta)

    def invalidate(self, mm_hash: str) -> None:
        """Forget that the engine has an image: it said so (vLLM from 0.28)."""
        if self.sender is not None:
            self.sender.invalidate(mm_hash)

    def clear_cache(self) -> None:
        """Forget everything; vLLM clears the engine's cache too."""
        self._found = {}
        self.prepared.clear_cache()
        if self.sender is not None:
            with self._sending:
                self.sender.clear_cache()

    def close(self) -> None:
        """Close vLLM's caches."""
        self._found = {}
        self.prepared.close()
        if self.sender is not None:
            self.sender.close()

    def knows(self, feature: Any) -> bool:
        """Whether the engine gets or has a feature's data."""
        if feature.data is not None:
            return True
        return self.sender is not None and self.sender.is_cached_item(_key(feature))

    def commit(self, features: Sequence[Any]) -> list[Any]:
        """The features as they go to the engine, where they count as known from now on.

        Does what the engine's cache does, step by step, so that both hold the same. Copies:
        samples of one prompt share features, and what the engine has may change between them.
        """
        if self.sender is None:
            return list(features)
        with self._sending:
            for feature in features:
                self.sender.touch_sender_cache_item(_key(feature))
            return [self._commit(self.sender, feature) for feature in features]

    def _commit(self, sender: Any, feature: Any) -> Any:
        if feature.data is None and not self.knows(feature):
            return feature  # the engine says that it does not have it
        data, _ = sender.get_and_update_item((feature.data, ()), _key(feature))
        return dataclasses.replace(feature, data=data)


def _key(feature: Any) -> str:
    """What the engine's cache calls an image."""
    return feature.mm_hash or feature.identifier


def connect(client: Any, cache: Any) -> None:
    """Let `client`, vLLM's client of the engine core, commit to its front end's `cache`."""
    if isinstance(cache, ImageCache):
        setattr(client, FIELD, cache)


def for_engine(client: Any, request: Any) -> Any:
    """`request` as it is sent by `client`, vLLM's client of the engine core, now.

    Raises what encoding raises, before anything has changed.
    """
    images: ImageCache | None = getattr(client, FIELD, None)
    if images is None or not getattr(request, "mm_features", None):
        return request  # text, or a message of another kind
    sent = copy.copy(request)
    encoder = getattr(client, "encoder", None)
    if encoder is not None:
        # Whatever cannot be encoded must fail here; images always can.
        sent.mm_features = None
        encoder.encode(sent)
    check_known(images, request.mm_features)
    sent.mm_features = images.commit(request.mm_features)
    return sent


def check_known(images: Any, features: Sequence[Any]) -> None:
    """Raise VLLMValidationError (HTTP 400) for an image that neither side has the data of."""
    for index, feature in enumerate(features):
        has_cache = isinstance(images, ImageCache)
        if not (images.knows(feature) if has_cache else feature.data is not None):
            from vllm.exceptions import VLLMValidationError

            raise VLLMValidationError(
                f"image {index} of the prompt was sent as its hash alone, and this server does not "
                "have it, or not any more: nothing is lost, send its data with it"
            )
