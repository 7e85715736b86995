"""Intervals of prompt positions against sets of positions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vision_exp.engine.spans import ImageSpan, scheduled_ranges, span_of, spans_of

PLACES = st.integers(0, 12)


def image(offset: int, length: int) -> SimpleNamespace:
    return SimpleNamespace(mm_position=SimpleNamespace(offset=offset, length=length))


@given(PLACES, st.integers(1, 8), st.integers(0, 8), PLACES, st.integers(0, 8))
def test_a_block_against_the_set_of_its_positions(
    start: int, length: int, pads: int, other: int, count: int
) -> None:
    span = ImageSpan(start, start + length, pads)
    block, step = set(range(start, start + length)), set(range(other, other + count))
    assert (span.first, ImageSpan(start, start + length).first) == (start + pads, start)
    if count:
        assert span.overlaps(other, other + count) is bool(block & step)
    before = {place for place in block if place < other}
    assert span.is_split_at(other) is bool(before and block - before)


@given(PLACES, st.integers(1, 8))
def test_start_lies_on_the_last_position_of_a_group(offset: int, length: int) -> None:
    span = span_of(image(offset, length))
    assert (span.start, span.stop) == (offset, offset + length)
    assert span.first % 4 == 3 and 0 <= span.first - offset < 4
    assert spans_of(None) == ()
    assert [one.start for one in spans_of([image(9, 2), image(1, 2)])] == [9, 1]


def test_what_a_step_computes() -> None:
    cached = SimpleNamespace(req_ids=["a", "b"], num_computed_tokens=[4, 0])
    new = [SimpleNamespace(req_id="c", num_computed_tokens=16)]
    output = SimpleNamespace(
        scheduled_cached_reqs=cached,
        scheduled_new_reqs=new,
        num_scheduled_tokens={"a": 6, "c": 17, "b": 1},
    )
    assert list(scheduled_ranges(output)) == [("a", 4, 10), ("c", 16, 33), ("b", 0, 1)]
    cached.num_computed_tokens.append(7)
    with pytest.raises(ValueError):
        list(scheduled_ranges(output))
