"""Whole images in one chunk: the arithmetic, and each release's real scheduler in a child."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_rig
from hypothesis import given
from hypothesis import strategies as st

from vision_exp.engine.scheduling import (
    AtomicImageScheduler,
    atomic_spans,
    check_fits,
    clip_chunk,
    largest_chunk,
    lookahead,
    truncate_hit,
)
from vision_exp.engine.spans import ImageSpan

CHILD = Path(__file__).parent / "in_vllm" / "child_scheduling.py"


def features(*places: tuple[int, int]) -> list[Any]:
    return [
        SimpleNamespace(mm_position=SimpleNamespace(offset=offset, length=length))
        for offset, length in places
    ]


@pytest.mark.parametrize(
    ("computed", "new", "expected"),
    [
        (0, 10, 10),  # ends where the image begins
        (0, 11, 10),
        (0, 29, 10),
        (0, 30, 30),  # the whole image
        (0, 45, 40),
        (10, 19, 0),  # begins at the image and cannot hold it
        (10, 20, 20),
        (31, 5, 5),
        (15, 5, 5),  # begins inside: nothing to keep whole any more
    ],
)
def test_a_chunk_ends_before_an_image_it_cannot_hold(
    computed: int, new: int, expected: int
) -> None:
    spans = (ImageSpan(10, 30), ImageSpan(40, 60))
    assert clip_chunk(spans, computed, new) == expected


@pytest.mark.parametrize(
    ("hit", "expected"), [(0, 0), (10, 10), (11, 10), (29, 10), (30, 30), (35, 35), (41, 40)]
)
def test_a_prefix_hit_inside_an_image_is_truncated(hit: int, expected: int) -> None:
    assert truncate_hit((ImageSpan(10, 30), ImageSpan(40, 60)), hit) == expected


def test_images_closer_than_the_draft_reads_are_one_span() -> None:
    near = features((40, 20), (10, 29))  # one token between them
    for ahead, expected in ((0, [(10, 39), (40, 60)]), (1, [(10, 39), (40, 60)]), (3, [(10, 60)])):
        assert [(span.start, span.stop) for span in atomic_spans(near, ahead)] == expected


@given(
    gaps=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 90)), min_size=1, max_size=5),
    budgets=st.lists(st.integers(1, 200), min_size=1, max_size=50),
)
def test_no_sequence_of_budgets_splits_an_image(
    gaps: list[tuple[int, int]], budgets: list[int]
) -> None:
    spans, position = [], 0
    for gap, length in gaps:
        spans.append(ImageSpan(position + gap, position + gap + length))
        position = spans[-1].stop
    computed = 0
    for budget in budgets:
        new = clip_chunk(spans, computed, min(budget, position - computed))
        computed += new
        assert not any(span.is_split_at(computed) for span in spans)


def test_largest_chunk_is_the_smallest_of_the_limits() -> None:
    def config(**changes: Any) -> Any:
        scheduler = {
            "max_num_batched_tokens": 2048,
            "max_num_scheduled_tokens": None,
            "long_prefill_token_threshold": 0,
        }
        speculative = changes.pop("speculative", None)
        return SimpleNamespace(
            scheduler_config=SimpleNamespace(**{**scheduler, **changes}),
            speculative_config=speculative,
        )

    assert largest_chunk(config()) == 2048
    assert largest_chunk(config(max_num_scheduled_tokens=1000)) == 1000
    assert largest_chunk(config(long_prefill_token_threshold=300)) == 300
    slots = SimpleNamespace(max_num_new_slots_for_drafting=5)
    assert largest_chunk(config(speculative=slots)) == 2043


def test_lookahead_follows_the_draft() -> None:
    assert lookahead(None) == 0
    ngram = SimpleNamespace(use_eagle=lambda: False)
    assert lookahead(ngram) == 0
    old = SimpleNamespace(use_eagle=lambda: True, num_speculative_tokens=3)
    assert lookahead(old) == 1
    several = SimpleNamespace(
        use_eagle=lambda: True, use_multi_module_mtp=lambda: True, num_speculative_tokens=3
    )
    assert lookahead(several) == 3


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


@cache
def seen(release: str) -> dict[str, Any]:
    return vllm_rig.observe(CHILD, vllm_rig.tree(release))


@pytest.fixture(params=vllm_rig.BY_RELEASE)
def release(request: pytest.FixtureRequest) -> dict[str, Any]:
    return seen(request.param)


def test_images_at_every_offset_stay_whole(release: dict[str, Any]) -> None:
    assert release["every_offset"] == {"bad": []}


def test_a_cached_image_stays_whole_where_vllm_splits_it(release: dict[str, Any]) -> None:
    assert release["cached_image"] == {"overlay": [], "stock": ["a"]}


def test_an_image_at_the_chunks_start_waits_for_the_budget(release: dict[str, Any]) -> None:
    found = release["at_chunk_start"]
    assert found["overlay"] == {"split": [], "hang": False}
    assert found["stock"] == {"split": ["a"], "hang": False}


def test_prefix_hits_never_end_inside_an_image(release: dict[str, Any]) -> None:
    assert release["prefix_hits"]["bad"] == []
    # Hits do happen, before and after the images.
    assert {0, 256, 1280} <= set(release["prefix_hits"]["hits"])
    assert release["stock_hit"] == [512, 256]


def test_connector_hits_inside_an_image_are_declined(release: dict[str, Any]) -> None:
    found = release["connector_hits"]
    assert [found[key] for key in ("256", "512", "1024", "1400")] == [256, 0, 1024, 1400]
    assert found["whole prompt that ends in the image"] == [0, False]
    assert "recompute" in found["recompute"]


def test_the_window_cache_holds_the_rows_an_image_reads(release: dict[str, Any]) -> None:
    assert release["window_rows"] == {"missing": []}


def test_an_image_beyond_every_budget_blocks_nobody(release: dict[str, Any]) -> None:
    assert release["never_fits"] == {"hang": False, "covered": True}


def test_schedulers_of_other_checkpoints_are_untouched(release: dict[str, Any]) -> None:
    assert release["text_untouched"] == {"replaced": []}


def test_an_image_that_never_fits_is_refused_with_the_number(release: dict[str, Any]) -> None:
    found = release["refusal"]
    assert found["wrapped"]
    assert found["text model"] == "accepted, 0 checked"
    assert found["383"] == "accepted, 1 checked"
    assert found["reserved"] == "KeyError: 'no block'"
    assert found["382"].startswith("VLLMValidationError: image 0 of the prompt takes 383 tokens")
    assert found["threshold"].startswith("VLLMValidationError")


def test_drafts_that_read_ahead_neither_split_nor_hang(release: dict[str, Any]) -> None:
    found = release["with_draft"]
    assert found["bad"] == []
    assert found["ran"] > 30 and found["refused"] > 5
