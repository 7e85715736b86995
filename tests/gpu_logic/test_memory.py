"""What the memory checks conclude from what they measured, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import released_config
from gpu.jobs import checks_compile_stalls, checks_memory, checks_shared_encoding
from gpu.jobs.checks_shared_encoding import Entry, Story
from gpu.lib.rig import PLACEHOLDER_ID, SQUARE, random_image
from gpu.reference.image import block_of, patches_of

GOOD = Story(
    shared=Entry(2, False, True, False),
    aborted=Entry(1, False, True, False),
    after=Entry(0, True, True, True),
    pressed=Entry(0, False, False, False),
    encoded=1,
    tokens=3,
    slots_back=True,
)


def test_an_encoding_is_held_while_one_needs_it_and_reclaimed_after() -> None:
    good, words = checks_shared_encoding.assess_story(GOOD)
    assert good
    assert "users 2, 1 after an abort in the same step, 0 after it" in words


@pytest.mark.parametrize(
    "wrong",
    [
        replace(GOOD, shared=Entry(1, False, True, False)),
        replace(GOOD, shared=Entry(2, True, True, False)),
        replace(GOOD, aborted=Entry(1, True, True, False)),
        replace(GOOD, aborted=Entry(0, False, True, False)),
        replace(GOOD, aborted=Entry(1, False, False, False)),
        replace(GOOD, after=Entry(1, True, True, True)),
        replace(GOOD, after=Entry(0, False, True, True)),
        replace(GOOD, after=Entry(0, True, False, True)),
        replace(GOOD, after=Entry(0, True, True, False)),
        replace(GOOD, pressed=Entry(0, True, True, False)),
        replace(GOOD, pressed=Entry(0, False, False, True)),
        replace(GOOD, encoded=2),
        replace(GOOD, tokens=2),
        replace(GOOD, slots_back=False),
    ],
)
def test_everything_about_a_shared_encoding_is_judged(wrong: Story) -> None:
    good, words = checks_shared_encoding.assess_story(wrong)
    assert not good
    assert "not as it should be" in words


def test_pressure_fills_the_cache_with_other_pictures() -> None:
    cells = patches_of(random_image(*SQUARE, seed=1), released_config.VISION).llm_grid
    asks = checks_shared_encoding.press(2048)
    assert len(asks) * cells[0] * cells[1] > 2048
    assert len({ask.images[0].tobytes() for ask in asks}) == len(asks)


def test_new_sizes_are_new_and_prompts_of_one_length() -> None:
    grids = set()
    for size in checks_compile_stalls.NEW:
        ask = checks_compile_stalls.prompt(size, 7)
        found = patches_of(ask.images[0], released_config.VISION)  # refuses what is resized
        grids.add(found.vit_grid)
        block = len(block_of(found.llm_grid, ask.ids.index(PLACEHOLDER_ID))[0])
        assert len(ask.ids) - 1 + block == checks_compile_stalls.TOTAL
    assert len(grids) == 8
    assert not grids & {(28, 28), (42, 74), (24, 138)}
    with pytest.raises(ValueError, match="no room"):
        checks_compile_stalls.prompt((1260, 700), 7)


def test_a_first_request_may_take_three_times_as_long() -> None:
    same = (33, 1 << 20)
    assert checks_compile_stalls.assess_stalls([0.1, 0.29], [0.1, 0.1, 0.5], same, same)[0]
    assert not checks_compile_stalls.assess_stalls([0.1, 0.31], [0.1, 0.1, 0.5], same, same)[0]
    assert not checks_compile_stalls.assess_stalls([0.1], [0.1], same, (34, 1 << 20))[0], (
        "another graph"
    )
    assert not checks_compile_stalls.assess_stalls([0.1], [0.1], same, (33, 1 << 21))[0], (
        "more bytes"
    )
    assert not checks_compile_stalls.assess_stalls([0.1], [0.1], (0, 0), (0, 0))[0], (
        "no graphs at all"
    )


def test_a_peak_below_the_activations_was_not_measured() -> None:
    size, mib = (1932, 336), 1 << 20
    assess = checks_memory.assess_footprint
    assert assess(900 * mib, 150 * mib, 120 * mib, 19 * mib, 8 << 30, size)[0]
    assert not assess(900 * mib, 150 * mib, 5 * mib, 1 * mib, 8 << 30, size)[0]
    assert not assess(900 * mib, 0, 120 * mib, 19 * mib, 8 << 30, size)[0]
    assert not assess(900 * mib, 150 * mib, 19 * mib, 19 * mib, 8 << 30, size)[0]
    assert not assess(900 * mib, 150 * mib, 120 * mib, 0, 8 << 30, size)[0]
