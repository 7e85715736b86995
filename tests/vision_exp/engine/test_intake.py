"""Which images count as known to the engine, and when, without vLLM: its caches are small fakes."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from vision_exp.engine import intake, unread


class Mirror:
    """Of vLLM's caches what is asked here: `room` images, least recently used out first."""

    def __init__(self, room: int, *, keeps_data: bool) -> None:
        self.room, self.keeps_data = room, keeps_data
        self.held: dict[str, Any] = {}

    def is_cached_item(self, key: str) -> bool:
        return key in self.held

    def touch_sender_cache_item(self, key: str) -> None:
        if key in self.held:
            self.held[key] = self.held.pop(key)

    def get_and_update_item(self, item: Any, key: str) -> Any:
        if key in self.held:
            self.touch_sender_cache_item(key)
            return self.held[key] if self.keeps_data else (None, ())
        assert item is not None, key
        while len(self.held) >= self.room:
            del self.held[next(iter(self.held))]
        self.held[key] = item
        return item

    def clear_cache(self) -> None:
        self.held.clear()

    def invalidate(self, key: str) -> None:
        del self.held[key]

    def close(self) -> None:
        self.held = {"closed": None}


@dataclass
class Feature:
    identifier: str
    data: Any = "pixels"
    mm_hash: str | None = None


@dataclass
class Request:
    mm_features: Any = field(default_factory=list)
    request_id: str = "r"
    odd: bool = False


class Client:
    """A client of the engine core whose encoder refuses odd requests."""

    def __init__(self, room: int = 2) -> None:
        self.images = intake.ImageCache(
            Mirror(room, keeps_data=True), Mirror(room, keeps_data=False)
        )
        self.encoder = SimpleNamespace(encode=self._encode)
        self.engine = Mirror(room, keeps_data=True)
        intake.connect(self, self.images)

    def _encode(self, request: Request) -> None:
        if request.odd:
            raise TypeError("cannot be encoded")

    def send(self, *names: str, data: str | None = "pixels") -> list[Any]:
        """What of the images' data goes to the engine."""
        request = Request([Feature(name, data) for name in names])
        sent = intake.for_engine(self, request)
        assert all(feature.data == data for feature in request.mm_features), "the request changed"
        for feature in sent.mm_features:
            self.engine.touch_sender_cache_item(feature.identifier)
        for feature in sent.mm_features:
            given = None if feature.data is None else (feature.data, ())
            self.engine.get_and_update_item(given, feature.identifier)
        assert list(self.engine.held) == list(self.images.sender.held)  # type: ignore[union-attr]
        return [feature.data for feature in sent.mm_features]


def test_an_image_is_sent_once() -> None:
    client = Client()
    assert client.send("a", "a") == ["pixels", None]
    assert client.send("a", "b") == [None, "pixels"]


def test_an_image_that_the_engine_evicted_is_sent_again() -> None:
    client = Client()
    client.send("a")
    client.send("b", "c")
    assert client.send("a") == ["pixels"]


def test_an_image_that_its_own_request_evicts_is_sent() -> None:
    client = Client()
    client.send("a", "b")
    assert client.send("c", "d", "a") == ["pixels", "pixels", "pixels"]


def test_what_a_request_has_is_the_last_to_be_evicted() -> None:
    client = Client()
    client.send("a", "b")
    assert client.send("c", "a") == ["pixels", None]


def test_what_is_cleared_or_was_never_there_is_sent_again() -> None:
    client = Client()
    images, engine = client.images, client.engine
    images.get_and_update_item(("pixels", []), "a")
    client.send("a")
    images.clear_cache()
    engine.clear_cache()
    assert images.is_cached(["a"]) == [False]
    assert client.send("a", "b") == ["pixels", "pixels"]
    images.invalidate("a")
    engine.invalidate("a")
    assert client.send("a") == ["pixels"]
    images.close()
    for cache in (images.prepared, images.sender):
        assert cache.held == {"closed": None}  # type: ignore[union-attr]


def test_processing_changes_nothing_at_the_engine() -> None:
    client = Client()
    images = client.images
    assert images.is_cached(["a"]) == [False]
    images.get_and_update_item(("pixels", ["update"]), "a")
    assert images.is_cached(["a"]) == [True]
    assert images.get_and_update_item(None, "a") == ("pixels", ["update"])
    assert client.send("a") == ["pixels"]


def test_a_hit_outlives_what_its_prompt_evicts() -> None:
    images = Client(room=1).images
    images.get_and_update_item(("pixels of a", []), "a")
    assert images.is_cached(["b", "a"]) == [False, True]
    images.get_and_update_item(("pixels of b", []), "b")
    assert images.get_and_update_item(None, "a") == ("pixels of a", [])


def test_a_request_that_cannot_be_encoded_changes_nothing() -> None:
    client = Client()
    with pytest.raises(TypeError, match="encoded"):
        intake.for_engine(client, Request([Feature("a")], odd=True))
    assert client.send("a") == ["pixels"]


def test_a_hash_alone_is_taken_where_the_engine_has_the_image() -> None:
    pytest.importorskip("vllm.exceptions")
    from vllm.exceptions import VLLMValidationError

    client = Client()
    client.send("a")
    assert client.send("a", data=None) == [None]
    with pytest.raises(VLLMValidationError, match="image 1 .* send its data"):
        client.send("a", "b", data=None)
    assert client.send("b") == ["pixels"]
    with pytest.raises(VLLMValidationError, match="image 0"):
        intake.check_known(None, [Feature("a", None)])


def test_text_and_clients_of_other_models_are_left_alone() -> None:
    request = Request()
    assert intake.for_engine(Client(), request) is request
    request = Request([Feature("a")])
    assert intake.for_engine(SimpleNamespace(), request) is request


# --- shared memory --------------------------------------------------------------------------------


def scheduler(kind: str) -> Any:
    multimodal = SimpleNamespace(mm_processor_cache_type=kind)
    model_config = SimpleNamespace(multimodal_config=multimodal)
    made = SimpleNamespace(vllm_config=SimpleNamespace(model_config=model_config), requests={})
    unread.watch(made)
    return made


def step(of: Any, *scheduled: str) -> list[Any]:
    """What workers read besides the requests of a step."""
    new = [SimpleNamespace(req_id=name) for name in scheduled]
    output = unread.add_ended(of, SimpleNamespace(scheduled_new_reqs=new))
    found: list[Any] = []
    unread.read(SimpleNamespace(get_and_update_features=found.append), output)
    return found


def test_images_of_a_request_that_ended_unscheduled_are_read_once() -> None:
    one = scheduler("shm")
    for name in ("waits", "runs", "ends"):
        request = Request([name], name)
        unread.arrived(one, request)
        one.requests[name] = request
    assert step(one, "runs") == []
    del one.requests["ends"], one.requests["runs"]
    assert step(one) == [["ends"]]
    assert step(one) == []
    del one.requests["waits"]
    assert step(one) == [["waits"]]


def test_nothing_is_noted_without_shared_memory() -> None:
    one = scheduler("lru")
    unread.arrived(one, Request(["image"]))
    assert step(one) == []
