"""Whole images in one chunk: the arithmetic, and each release's real scheduler in a child."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_rig
from hypothesis import given
from hypothesis import strategies as st

from vision_exp.engine.scheduling import (
    atomic_spans,
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
