"""When a treated run counts as the same answer, without a GPU: what passes, and what does not."""

from __future__ import annotations

import math

import pytest
from gpu.lib import answers, equivalence
from gpu.lib.answers import Answer
from gpu.lib.equivalence import Run, Runs


def answer(*steps: tuple[float, ...], cached: int = 0) -> Answer:
    """Log-probabilities of tokens 0, 1, ... at each step; the likeliest is taken."""
    rows = [dict(enumerate(step)) for step in steps]
    return Answer([max(row, key=row.__getitem__) for row in rows], rows, cached)


def shifted(by: float, *later: tuple[float, ...]) -> Answer:
    """Its first step is ``by`` nats away from that of ``shifted(0)``."""
    return answer((-1.0 + by, -4.0 - by, -9.0 + by, -9.0 - by), *later)


def test_distance_is_what_the_same_tokens_moved_by_apart_from_all_together() -> None:
    assert answers.distance({1: -1.0, 2: -2.0}, {1: -3.0, 2: -4.0}) == 0
    assert answers.distance({1: -1.0, 2: -2.0}, {1: -0.5, 2: -2.5}) == pytest.approx(0.5)
    assert answers.distance(shifted(0).first, shifted(0.3).first) == pytest.approx(0.3)
    one, two = shifted(0.1).first, shifted(-0.7).first
    assert answers.distance(one, two) == answers.distance(two, one)


@pytest.mark.parametrize("other", [{1: -1.0}, {1: -1.0, 3: -2.0}, {}])
def test_answers_that_list_other_tokens_have_no_distance(other: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="listed by one"):
        answers.distance({1: -1.0, 2: -2.0}, other)
    with pytest.raises(ValueError, match="listed by one"):
        answers.distance({}, {})


def test_nearest_and_spread_of_a_group() -> None:
    group = [shifted(by).first for by in (0.0, 0.2, 0.5)]
    assert answers.spread(group) == pytest.approx(0.5)
    assert answers.nearest(shifted(0.6).first, group) == pytest.approx(0.1)
    assert answers.nearest(shifted(0.6).first, []) == math.inf
    assert answers.spread(group[:1]) == 0


def text(spread: float = 0.4, warm: float = 0.1) -> Runs:
    return Runs([shifted(0), shifted(spread)], [shifted(-warm)])


def assessed(images: list[Runs], texts: list[Runs], **controls: float) -> tuple[bool, str]:
    return equivalence.same_answers(images, texts, controls or {"other": 0.9}, noise=0.2)


def test_a_run_as_near_as_text_moves_passes_and_one_further_away_does_not() -> None:
    cold = [shifted(0), shifted(0.1)]
    assert assessed([Runs(cold, [shifted(0.45), shifted(-0.3)])], [text()])[0]
    assert not assessed([Runs(cold, [shifted(0.55), shifted(0)])], [text()])[0]
    assert not assessed([Runs(cold, [shifted(0), shifted(0.55)])], [text()])[0]
    assert not assessed([Runs(cold, [shifted(0)]), Runs(cold, [shifted(0.55)])], [text()])[0]


def test_text_that_the_treatment_moves_allows_as_much() -> None:
    run = Runs([shifted(0)], [shifted(0.5)])
    assert not assessed([run], [text(warm=0.1)])[0]
    assert assessed([run], [text(warm=0.1), text(warm=0.6)])[0]


def test_what_the_image_itself_moves_by_excuses_nothing() -> None:
    cold = [shifted(0), shifted(3.0)]
    good, words = assessed([Runs(cold, [shifted(1.0)])], [text()])
    assert not good
    assert "of the image 3.000" in words
    assert "undecidable" not in words


def test_a_control_within_what_text_moves_by_leaves_nothing_to_conclude() -> None:
    run = Runs([shifted(0)], [shifted(0)])
    assert assessed([run], [text()], other=0.41, off=0.8)[0]
    good, words = assessed([run], [text()], other=0.8, off=0.39)
    assert not good
    assert "undecidable" in words


def test_tokens_must_be_those_of_a_repeat_or_part_as_repeats_do() -> None:
    cold = [shifted(0, (-1.0, -1.1, -9.0, -9.0))]
    near = shifted(0, (-1.1, -1.05, -9.0, -9.0))
    far = shifted(0, (-1.4, -1.0, -9.0, -9.0))
    texts = [
        Runs([shifted(0, (-1.0, -2.0)), shifted(0.4, (-1.0, -2.0))], [shifted(0, (-1.0, -2.0))])
    ]
    assert assessed([Runs(cold, [near])], texts)[0]
    assert not assessed([Runs(cold, [far])], texts)[0]


def test_a_later_token_is_compared_with_repeats_of_the_same_beginning() -> None:
    first, other = (-1.0, -4.0), (-4.0, -1.0)
    cold = [answer(first, (-1.0, -2.0)), answer(other, (-5.0, -9.0))]
    assert Runs(cold, [answer(first, (-1.1, -2.0))], at=1).moved() == pytest.approx(0.05)
    assert Runs(cold, [answer(other, (-5.0, -9.0))], at=1).moved() == 0
    assert Runs(cold[:1], [answer(other, (-5.0, -9.0))], at=1).moved() == math.inf
    assert Runs(cold, [], at=1).spread() == 0
    assert Runs(cold, []).spread() == pytest.approx(3.0)


def test_a_control_is_as_near_as_its_nearest_run() -> None:
    cold = [shifted(0), shifted(0.2)]
    assert equivalence.nearness(cold, [shifted(1.0), shifted(0.7)]) == pytest.approx(0.5)


IMAGE = ((600, 969),)


def run(*ranges: tuple[int, int], cached: int = 0, encoded: int = 0, blocks=IMAGE) -> Run:
    return Run(answer((-1.0, -2.0), cached=cached), encoded, ranges, blocks)


def test_encoder_runs_are_counted_in_every_run() -> None:
    needs = equivalence.encodes(1)
    assert needs([run(encoded=1), run(encoded=1)], [run()])[0]
    assert not needs([run(encoded=1), run(encoded=0)], [run()])[0]
    assert not needs([run(encoded=1)], [run(encoded=1)])[0]


@pytest.mark.parametrize(
    ("image", "text", "where"), [(512, 512, "before"), (512, 768, "inside"), (1024, 1024, "after")]
)
def test_a_prefix_hit_must_end_where_its_row_says(image: int, text: int, where: str) -> None:
    needs = equivalence.hits(image, text, where)
    runs, texts = [run(cached=image)] * 2, [run(cached=text, blocks=())] * 2
    assert needs(runs, texts)[0]
    assert not needs([*runs, run(cached=256)], texts)[0]
    assert not needs(runs, [*texts, run(cached=256)])[0]
    for other in {"before", "inside", "after"} - {where}:
        assert not equivalence.hits(image, text, other)(runs, texts)[0]


def test_a_hit_inside_an_image_is_no_hit() -> None:
    assert not equivalence.hits(768, 768, "inside")([run(cached=768)], [run(cached=768)])[0]


def test_a_chunk_ends_before_an_image_that_it_would_split() -> None:
    needs = equivalence.unsplit(785)
    image, twin = run((0, 600), (600, 1009)), run((0, 785), (785, 1009), blocks=())
    assert needs([image, image], [twin])[0]
    assert not needs([run((0, 785), (785, 1009))], [twin])[0]
    assert not needs([run((0, 600), (600, 785), (785, 1009))], [twin])[0]
    assert not needs([run((0, 601), (601, 1009))], [twin])[0]
    assert not needs([run((0, 500), (500, 1009))], [twin])[0]
    assert not needs([run((0, 600), (600, 1000), (1001, 1009))], [twin])[0]
    assert not needs([run((0, 600), (600, 1000))], [twin])[0]
    assert not needs([image], [run((0, 1009))])[0], "the steps were not that short"
    outside = run((0, 300), (300, 1009), blocks=((300, 669),))
    assert not needs([outside], [twin])[0], "785 lies behind the image"


def test_a_preempted_prompt_starts_again_and_is_not_split() -> None:
    needs = equivalence.restarted(985, 1009)
    good = run((0, 985), (0, 985), (985, 1009))
    assert needs([good, good], [])[0]
    assert not needs([run((0, 985), (985, 1009))], [])[0]
    assert not needs([run((0, 1009), (0, 985), (985, 1009))], [])[0]
    assert not needs([run((0, 985), (0, 985))], [])[0]
    assert not needs([run((0, 985), (0, 785), (785, 1009))], [])[0]
    assert not needs([run((0, 985), (985, 990), (990, 1009))], [])[0]
    assert not needs([run((0, 985))], [])[0]
    assert not needs([run((0, 985), (0, 985), (985, 1009), blocks=())], [])[0], "no image"


def test_both_needs_are_needed() -> None:
    needs = equivalence.both(equivalence.encodes(0), equivalence.hits(512, 768, "inside"))
    assert needs([run(cached=512)], [run(cached=768)])[0]
    assert not needs([run(cached=512, encoded=1)], [run(cached=768)])[0]
    assert not needs([run(cached=256)], [run(cached=768)])[0]
