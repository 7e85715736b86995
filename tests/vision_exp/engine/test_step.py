"""Which steps have image rows, against a walk over every scheduled position."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vision_exp.engine import context, step


@st.composite
def placeholders(draw):
    """Image blocks of one prompt in order, as (offset, length), at least 6 tokens each."""
    blocks, at = [], 0
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 9), st.integers(6, 30)), max_size=3)):
        blocks.append((at + gap, length))
        at += gap + length
    return blocks


@given(
    st.dictionaries(
        st.sampled_from("abc"),
        st.tuples(placeholders(), st.integers(0, 90), st.integers(1, 40), st.booleans()),
    )
)
def test_every_position_decides(requests):
    seen: step.Blocks = {}
    new = [
        SimpleNamespace(req_id=name, num_computed_tokens=start, mm_features=_features(blocks))
        for name, (blocks, start, _, _) in requests.items()
    ]
    first = _output(new=new, counts={name: entry[2] for name, entry in requests.items()})
    target, draft = step.observe(seen, first)
    image = {
        name: {p for offset, length in blocks for p in range(offset, offset + length)}
        for name, (blocks, *_) in requests.items()
    }
    rows = {name: range(start, start + count) for name, (_, start, count, _) in requests.items()}
    successors = {name: range(r.start, r.stop + 1) for name, r in rows.items()}
    assert target.has_image_rows == any(image[name] & set(rows[name]) for name in requests)
    assert draft == any(image[name] & set(successors[name]) for name in requests)
    for name, (blocks, *_) in requests.items():
        spans = target.spans.get(name, ())
        assert [(span.start, span.stop) for span in spans] == [(o, o + n) for o, n in blocks]
        assert all(span.first % 4 == 3 for span in spans)
        assert all(0 <= span.first - span.start <= 3 for span in spans)

    # The next step: some go on, the others end; what the requests are is remembered.
    ended = {name for name, entry in requests.items() if entry[3]}
    going = {name: rows[name].stop for name in requests if name not in ended}
    second = _output(cached=going, counts=dict.fromkeys(going, 7), finished=ended)
    target, _ = step.observe(seen, second)
    assert target.has_image_rows == any(
        image[name] & set(range(start, start + 7)) for name, start in going.items()
    )
    assert not ended & seen.keys()


def test_an_id_used_again_starts_anew():
    seen: step.Blocks = {}
    images = [SimpleNamespace(req_id="a", num_computed_tokens=0, mm_features=_features([(2, 6)]))]
    assert step.observe(seen, _output(new=images, counts={"a": 9}))[0].has_image_rows
    text = [SimpleNamespace(req_id="a", num_computed_tokens=0, mm_features=[])]
    assert not step.observe(seen, _output(new=text, counts={"a": 9}))[0].has_image_rows


def _features(blocks):
    return [
        SimpleNamespace(mm_position=SimpleNamespace(offset=offset, length=length))
        for offset, length in blocks
    ]


def _output(new=(), cached=None, counts=None, finished=frozenset()):
    cached = cached or {}
    return SimpleNamespace(
        finished_req_ids=finished,
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=list(cached.values())
        ),
        num_scheduled_tokens=counts or {},
    )


@pytest.fixture
def clean() -> Iterator[None]:
    before = context.set_current(context.NO_IMAGES)
    yield
    context.set_current(before)


@pytest.mark.usefixtures("clean")
def test_current_is_empty_outside_steps() -> None:
    before = context.set_current(context.StepContext(True))
    assert before == context.NO_IMAGES
    assert context.set_current(before) == context.StepContext(True)
    assert context.current() == context.NO_IMAGES


@pytest.mark.usefixtures("clean")
def test_facts_are_added_to_the_step_and_do_not_outlive_it() -> None:
    step_context = context.StepContext(True)
    context.set_current(step_context)
    context.publish(request_ids=("a", "b"))
    assert context.current() == context.StepContext(True, request_ids=("a", "b"))
    assert step_context.request_ids == ()
    with pytest.raises(TypeError):
        context.publish(order=("a",))
    context.set_current(context.StepContext(True))
    assert context.current().request_ids == ()


@pytest.mark.usefixtures("clean")
def test_what_a_call_publishes_ends_with_it() -> None:
    with pytest.raises(KeyError), context.during(mega_moe="outer"):
        with context.during(mega_moe="inner"):
            assert context.current().mega_moe == "inner"
            context.publish(request_ids=("a",))
        assert (context.current().mega_moe, context.current().request_ids) == ("outer", ("a",))
        raise KeyError
    assert context.current().mega_moe is None


@pytest.mark.usefixtures("clean")
def test_threads_that_a_step_starts_see_it() -> None:
    """vLLM runs micro-batches in threads of their own."""
    context.set_current(context.StepContext(True))
    seen: list[context.StepContext] = []
    thread = threading.Thread(target=lambda: seen.append(context.current()))
    thread.start()
    thread.join()
    assert seen == [context.StepContext(True)]
