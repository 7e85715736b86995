"""A request that ended with an error is an error for its client, with the cause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from vision_exp.engine.failures import client


def output(name: str, finish: str | None, stop: object = None) -> Any:
    return SimpleNamespace(
        request_id=name, outputs=[SimpleNamespace(finish_reason=finish, stop_reason=stop)]
    )


@pytest.mark.parametrize(
    ("finish", "stop", "cause"),
    [
        ("length", None, None),
        ("stop", "word", None),
        (None, None, None),
        ("error", "the tower broke", "the tower broke"),
        ("error", None, client.UNKNOWN),
        ("error", 7, client.UNKNOWN),
        ("error", "x" * 9000, "x" * client.MOST),
    ],
)
def test_a_cause_is_told_for_errors_only(finish: str | None, stop: object, cause: Any) -> None:
    assert client.cause(output("r", finish, stop)) == cause


def test_an_offline_batch_keeps_its_other_answers() -> None:
    batch = [output("0", "length"), output("1", "error", "broke"), output("2", "stop")]
    client.check_batch([batch[0], batch[2]])
    with pytest.raises(client.RequestsFailed, match=r"1 of 3 requests .* request 1: broke") as told:
        client.check_batch(batch)
    assert told.value.outputs == batch and told.value.causes == {"1": "broke"}


def test_a_stream_of_responses_that_breaks_off_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "_generation_error", lambda: LookupError)

    async def events(*, broken: bool) -> AsyncGenerator[Any, None]:
        yield "created"
        if broken:
            raise LookupError("the tower broke" + "x" * 9000)

    async def all_of(*, broken: bool) -> list[Any]:
        return [event async for event in client.end_with_error(events(broken=broken))]

    assert asyncio.run(all_of(broken=False)) == ["created"]
    created, error = asyncio.run(all_of(broken=True))
    assert (created, error.type, error.sequence_number) == ("created", "error", 1)
    assert error.message.startswith("the tower broke") and len(error.message) <= 2 * client.MOST
    assert error.model_dump()["error"]["message"] == error.message
