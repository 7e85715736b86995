"""The rules of whole images against a model that walks over positions, and edges of each limit."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vision_exp.engine.scheduling import (
    AtomicImageScheduler,
    atomic_spans,
    check_fits,
    clip_chunk,
    largest_chunk,
    truncate_hit,
)
from vision_exp.engine.spans import ImageSpan


def features(*places: tuple[int, int]) -> list[Any]:
    return [
        SimpleNamespace(mm_position=SimpleNamespace(offset=offset, length=length))
        for offset, length in places
    ]


def inside(spans: Any, boundary: int) -> bool:
    """Whether a boundary cuts an image, by walking over its positions."""
    return any({boundary - 1, boundary} <= {*range(s.start, s.stop)} for s in spans)


@st.composite
def places(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Images as (offset, length), often adjacent, in an order that is not theirs in the prompt."""
    found, position = [], 0
    for gap, length in draw(
        st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12)), min_size=1, max_size=4)
    ):
        found.append((position + gap, length))
        position += gap + length
    return draw(st.permutations(found))


@given(places(), st.integers(0, 4), st.integers(0, 30), st.integers(1, 40))
def test_chunks_are_the_longest_that_a_model_of_positions_allows(
    images: list[tuple[int, int]], ahead: int, computed: int, new: int
) -> None:
    """With a draft that reads `ahead` further, no end lies so that it reads a part of an image."""
    alone = [ImageSpan(start, start + length) for start, length in sorted(images)]
    spans = atomic_spans(features(*images), ahead)
    covered = {p for span in spans for p in range(span.start, span.stop)}
    gaps = [range(a.stop, b.start) for a, b in zip(alone, alone[1:], strict=False)]
    wanted = {p for one in alone for p in range(one.start, one.stop)}
    assert covered == wanted.union(*(gap for gap in gaps if len(gap) < ahead))
    cuts = [
        not inside(alone, p) and not any(g.start <= p <= g.stop and len(g) < ahead for g in gaps)
        for p in range(100)
    ]
    assert [not inside(spans, p) for p in range(100)] == cuts
    found = clip_chunk(spans, computed, new)
    begun = [s for s in spans if s.start < computed < s.stop]
    allowed = [
        n
        for n in range(new + 1)
        if all(not inside([s], computed + n) for s in spans if s not in begun)
    ]
    assert found == max(allowed)
    assert truncate_hit(spans, computed) == (begun[0].start if begun else computed)


def server(batched: int, speculative: Any = None, threshold: int = 0) -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=batched,
            max_num_scheduled_tokens=None,
            long_prefill_token_threshold=threshold,
        ),
        speculative_config=speculative,
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="fail"),
    )


def draft(ahead: int, slots: int = 0) -> Any:
    return SimpleNamespace(
        use_eagle=lambda: True,
        use_multi_module_mtp=lambda: True,
        num_speculative_tokens=ahead,
        max_num_new_slots_for_drafting=slots,
    )


def test_an_image_exactly_as_long_as_a_step_fits_and_one_longer_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refused(ValueError):
        pass

    exceptions = SimpleNamespace(VLLMValidationError=Refused)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(exceptions=exceptions))
    monkeypatch.setitem(sys.modules, "vllm.exceptions", exceptions)
    for speculative, room in ((None, 0), (draft(1), 0), (draft(3), 2), (draft(3, 4), 6)):
        check_fits(features((0, 100 - room)), server(100, speculative))
        with pytest.raises(Refused):
            check_fits(features((0, 101 - room)), server(100, speculative))
    assert largest_chunk(server(100, draft(1, 4), threshold=97)) == 96
    assert largest_chunk(server(100, draft(1, 4), threshold=50)) == 50


def rules(*images: tuple[int, int], batched: int = 100, ahead: int = 0) -> tuple[Any, Any]:
    """The rules of a scheduler, and a request with these images."""
    config = server(batched, draft(ahead) if ahead else None)
    made = AtomicImageScheduler(SimpleNamespace(vllm_config=config))
    return made, SimpleNamespace(mm_features=features(*images), request_id="r", num_tokens=60)


def test_rules_of_one_scheduler_on_a_request() -> None:
    made, request = rules((10, 20), (40, 20))
    # vLLM ends the chunk inside the second image: it ends before, and is asked again.
    asked: list[int] = []

    def encoder(request: Any, computed: int, new: int, budget: int) -> tuple[list, int, int]:
        asked.append(new)
        return [], min(new, 45), budget

    assert made._try_schedule(encoder, request, 0, 60, 9)[1] == 40
    assert asked == [60, 40]
    assert made._reserve(lambda request, computed, new: new - 5, request, 0, 60) == 40
    # Hits: shortened until none ends inside an image, and no longer than the look-up.
    limits: list[int] = []

    def hit(hashes: Any, limit: int) -> tuple[list, int]:
        limits.append(limit)
        return [], {60: 50, 40: 25, 10: 8}[limit]

    assert made._get_computed_blocks(lambda _: made._find_hit(hit, (), 60), request)[1] == 8
    assert limits == [60, 40, 10]
    assert made._find_hit(lambda hashes, limit: ([], 50), (), 60)[1] == 50
    with pytest.raises(KeyError):
        made._get_computed_blocks(lambda _: {}["a fault"], request)
    assert made.looked_up == ()


@pytest.mark.parametrize(
    ("computed", "count", "taken"),
    [(0, 10, 10), (0, 15, 0), (8, 2, 2), (8, 7, 0), (30, 10, 10), (0, 0, 0), (20, 40, 0)],
)
def test_rules_of_a_connector(computed: int, count: int, taken: int) -> None:
    made, request = rules((10, 20), (40, 20))  # the prompt ends with its second image
    assert made._matched(lambda *_: (count, True), request, computed) == (
        taken,
        taken > 0 or count == 0,
    )


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_rules_of_a_connector_that_recomputes(policy: str) -> None:
    made, _ = rules()
    scheduler = made.scheduler
    scheduler._try_schedule_encoder_inputs = None
    coordinator = SimpleNamespace(find_longest_cache_hit=None)
    scheduler.kv_cache_manager = SimpleNamespace(get_computed_blocks=None, coordinator=coordinator)
    scheduler.connector = SimpleNamespace(get_num_new_matched_tokens=None)
    scheduler.vllm_config.kv_transfer_config.kv_load_failure_policy = policy
    if policy == "fail":
        made.install()
        assert scheduler.connector.get_num_new_matched_tokens is not None
    else:
        with pytest.raises(ValueError, match="use 'fail'"):
            made.install()


def test_an_image_as_long_as_a_step_is_kept_whole_and_a_longer_one_waits_for_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, request = rules((10, 20), batched=20)
    assert [s.start for s in made._spans(request)] == [10]
    assert not caplog.records
    made, request = rules((10, 21), batched=20)
    assert made._spans(request) == ()
