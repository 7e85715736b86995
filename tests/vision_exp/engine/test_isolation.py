"""Which requests a failing image takes with it, and what the ranks agree on."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vision_exp.engine.failures import client, ranks, scheduler
from vision_exp.engine.failures.scheduler import AffectedRequest, FailedStep
from vision_exp.engine.failures.worker import Failures

NULL, SIZE = 0, 4


class Scheduler:
    """Requests with their blocks in two groups; block 0 is the null block of both."""

    def __init__(self, **blocks: tuple[list[int], list[int]]) -> None:
        self.ended: set[str] = set()
        self.evicted: set[int] = set()
        self.requests = {
            name: SimpleNamespace(
                request_id=name,
                client_index=int(name == "other"),
                is_finished=lambda name=name: name == "finished",
                mm_features=[SimpleNamespace(identifier="bad" if name == "same" else "good")],
            )
            for name in blocks
        }
        groups = [SimpleNamespace(block_size=SIZE), SimpleNamespace(block_size=2 * SIZE)]
        self.kv_cache_manager = SimpleNamespace(
            get_block_ids=blocks.__getitem__,
            evict_blocks=self.evicted.update,
            coordinator=SimpleNamespace(single_type_managers=groups),
            block_pool=SimpleNamespace(
                null_block=SimpleNamespace(block_id=NULL), num_gpu_blocks=50
            ),
        )
        self.encoder_cache_manager = SimpleNamespace(
            freeable={"bad": 7}, cached={"bad": 1, "used": 1}, freed=[], num_free_slots=3
        )

    def finish_requests(self, names: set[str], status: str) -> None:
        self.ended = set(names)


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The few names of vLLM that these decisions read."""

    class AsyncOutput:
        pass

    pieces = {
        "vllm": SimpleNamespace(exceptions=SimpleNamespace(GenerationError=KeyError)),
        "vllm.v1.request": SimpleNamespace(RequestStatus=SimpleNamespace(FINISHED_ERROR="error")),
        "vllm.v1.outputs": SimpleNamespace(AsyncModelRunnerOutput=AsyncOutput),
        "vllm.v1.engine": SimpleNamespace(
            EngineCoreOutput=lambda name, tokens, **rest: SimpleNamespace(name=name, **rest),
            EngineCoreOutputs=lambda: SimpleNamespace(outputs=[]),
            FinishReason=SimpleNamespace(ERROR="error"),
        ),
        "vllm.distributed.parallel_state": SimpleNamespace(
            get_tp_group=lambda: SimpleNamespace(world_size=1, cpu_group=None)
        ),
    }
    for name, piece in pieces.items():
        monkeypatch.setitem(sys.modules, name, piece)
    return pieces


def failed(name: str, position: int) -> FailedStep:
    return FailedStep({name: AffectedRequest("bad", position, "why")}, frozenset({"bad", "used"}))


def test_the_failed_request_and_those_that_share_its_spoilt_blocks_end() -> None:
    made = Scheduler(
        hit=([0, 1, 2, 3], [0, 11]),
        before=([0, 1, 2], [0, 10]),  # shares what lies before the image, and the null block
        after=([3], [20]),
        second_group=([30], [11]),
        finished=([3], [11]),
    )
    found = scheduler.end_requests(made, failed("hit", 13))
    assert made.ended == {"hit", "after", "second_group"} == {r.request_id for r, _ in found}
    assert made.evicted == {3, 11}
    cache = made.encoder_cache_manager
    assert (cache.freed, cache.cached, cache.freeable) == (["bad"], {"used": 1}, {})
    assert cache.num_free_slots == 10
    gone = Scheduler(finished=([3], [11]), a=([3], [11]))
    assert scheduler.end_requests(gone, failed("finished", 0)) == []


def test_a_null_block_behind_the_image_takes_nobody_along() -> None:
    made = Scheduler(hit=([0, 0], [0]), before=([0, 1], [0]))
    scheduler.end_requests(made, failed("hit", 0))
    assert made.ended == {"hit"} and made.evicted == set()


def test_a_preempted_request_takes_those_of_its_image() -> None:
    made = Scheduler(hit=([], []), same=([3], [4]), before=([5], [6]))
    scheduler.end_requests(made, failed("hit", 0))
    assert made.ended == {"hit", "same"}
    assert made.evicted == set(range(50))


def test_clients_hear_of_it_and_shared_outputs_stay_as_they_are() -> None:
    made = Scheduler(hit=([3], [4]), other=([3], [4]))
    outputs: dict[int, Any] = {}
    scheduler.add_errors(outputs, scheduler.end_requests(made, failed("hit", 0)))
    assert {index: [o.name for o in one.outputs] for index, one in outputs.items()} == {
        0: ["hit"],
        1: ["other"],
    }
    empty = SimpleNamespace()
    step = failed("hit", 0)
    assert scheduler.failed_step(scheduler.attach(empty, step)) is step
    assert scheduler.failed_step(empty) is None


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [({}, True), ({"world": 4}, False), ({"kv": 1}, False), ({"ec": 1}, False), ({"n": 0}, False)],
)
def test_isolation(changes: dict[str, int], wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "is_vision_exp", lambda config: bool(config))
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=changes.get("n", 1)),
        parallel_config=SimpleNamespace(world_size=changes.get("world", 2), tensor_parallel_size=2),
        kv_transfer_config=changes.get("kv"),
        ec_transfer_config=changes.get("ec"),
    )
    assert ranks.isolated(config) == wanted


@pytest.mark.parametrize(
    ("other", "lost", "wanted"),
    [
        ((("a",), False), False, True),
        ((("b",), False), False, False),
        ((("a",), True), False, False),
        (None, False, False),
    ],
)
def test_ranks_agree_on_the_same_images_alone(
    vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch, other: Any, lost: bool, wanted: bool
) -> None:
    group = SimpleNamespace(world_size=2, cpu_group=None)
    vllm["vllm.distributed.parallel_state"].get_tp_group = lambda: group

    def barrier(*_: Any) -> None:
        if other is None:
            raise RuntimeError("a rank did not come")

    def gather(found: list[Any], own: Any, group: Any) -> None:
        found[:] = [own, other or own]

    monkeypatch.setattr(torch.distributed, "monitored_barrier", barrier, raising=False)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather, raising=False)
    assert ranks.agree(["a"], lost) == wanted


def test_one_rank_goes_on_unless_its_device_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks.agree(["a"], False)
    assert not ranks.agree(["a"], True)
    monkeypatch.setattr(ranks, "device_lost", lambda: True)
    with pytest.raises(KeyError):
        ranks.recover(KeyError("x"), ["a"])


def answers(*outputs: Any) -> tuple[list[Any], bool]:
    closed = []

    async def stream():
        try:
            for output in outputs:
                yield output
        finally:
            closed.append(True)

    async def read() -> list[Any]:
        found = []
        reader = client.raise_failures(stream())
        async for one in reader:
            found.append(one)
            if one.outputs[0].finish_reason == "hang up":
                await reader.aclose()
                assert closed
        return found

    return asyncio.run(read()), bool(closed)


def output(reason: str | None, stop: Any = None) -> Any:
    one = SimpleNamespace(finish_reason=reason, stop_reason=stop)
    return SimpleNamespace(request_id="r", outputs=[one])


def test_a_stream_ends_with_every_error_and_with_nothing_else() -> None:
    fine = [output(None), output("stop", "word"), output("stop", 7)]
    assert answers(*fine)[0] == fine
    with pytest.raises(KeyError):
        answers(output(None), output("error", "an image"))
    with pytest.raises(KeyError, match="see the server's log"):
        answers(output(None), output("error"))
    assert answers(output("hang up"), output(None))[1]


def feature(name: str, offset: int, rows: int = 4) -> Any:
    place = SimpleNamespace(offset=offset, length=8, get_num_embeds=lambda: rows)
    return SimpleNamespace(identifier=name, mm_position=place)


def step(start: int, count: int, freed: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="r", num_computed_tokens=start)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens={"r": count},
        free_encoder_mm_hashes=freed,
    )


@pytest.mark.parametrize(("count", "zeros", "ends"), [(9, 0, 0), (10, 1, 0), (11, 1, 1)])
def test_the_drafts_lookahead_has_rows_and_ends_nobody(count: int, zeros: int, ends: int) -> None:
    """A draft reads one position further: it needs zeros, but the request read nothing yet."""
    made = Failures()
    made.reasons, made.template = {"bad": "why"}, torch.ones(1, 3)
    one, rows = feature("bad", 10), {}
    made.begin(step(0, count), rows)
    with made.zero_fill(rows, lambda _: [one]):
        assert [tuple(r.shape) for r in rows.values()] == [(4, 3)] * zeros
    assert (rows, one.identifier, len(made.affected)) == ({}, "bad", ends)
    report = made.report(SimpleNamespace())
    assert (scheduler.failed_step(report) is not None) == bool(ends)
    made.begin(step(0, 1, ("bad",)), rows)
    assert (made.reasons, made.affected) == ({}, {})


@pytest.mark.parametrize(("have", "ends"), [(3, 1), (4, 0), (5, 1)])
def test_rows_of_another_image_under_one_uuid(have: int, ends: int) -> None:
    made, one = Failures(), feature("u", 0)
    rows = {"u": torch.ones(have, 3)}
    made.begin(step(0, 9), rows)
    with made.zero_fill(rows, lambda _: [one]):
        assert len(rows[one.identifier]) == 4
    assert len(made.affected) == ends


def inputs(*images: int) -> dict[str, Any]:
    grids = torch.tensor([[1, 2]] * len(images))
    patches = torch.tensor(images).repeat_interleave(2)
    return {"patches": patches, "perm": patches, "vit_grid": grids, "llm_grid": grids}


def test_one_image_fails_alone_and_recovers() -> None:
    bad = {2}

    def encode(patches: Any, llm_grid: Any, **_: Any) -> list[Any]:
        if bad & set(patches.tolist()):
            raise ValueError("broken")
        return [torch.ones(2, 3)] * len(llm_grid)

    made, template = Failures(), torch.ones(1, 3)
    names = ["a", "sound", "b", "c"]
    made.will_encode(names, [(("audio" if n == "sound" else "image"), 0) for n in names])
    rows = made.encode(encode, inputs(1, 2), template)
    assert [bool(r.sum()) for r in rows] == [True, False]
    assert [*made.reasons] == ["b"]
    assert len(made.encode(encode, inputs(3), template)) == 1
    made.will_encode(["d", "e"], [("image", 0)] * 2)
    made.encode(encode, inputs(1), template)
    made.encode(encode, inputs(2), template)
    assert [*made.reasons] == ["b", "e"]
    cache = {"b": rows[1]}
    made.begin(step(0, 1), cache)
    assert cache == {}
    bad.clear()
    made.will_encode(["b"], [("image", 0)])
    made.encode(encode, inputs(2), template)
    assert [*made.reasons] == ["e"]
    made.will_encode(["b"], [("image", 0)])
    made.encode(lambda llm_grid, **_: [torch.ones(1, 3)] * len(llm_grid), inputs(2), template)
    assert "rows for images" in made.reasons["b"]
