"""What the GPU checks conclude from answers and launches, without a GPU."""

from __future__ import annotations

from gpu import answers, checks_server, compare_text

from vision_exp.validate_client import Answer


def answer(*chances: float) -> Answer:
    """Log-probabilities of the first token's alternatives a, b, c, ..."""
    tokens = dict(zip("abcde", chances, strict=False))
    return Answer(max(tokens, key=tokens.__getitem__), 1, [tokens])


def company(moved: float, *, other: int = 0) -> checks_server.Company:
    """Eight requests whose answers differ by nats; ``moved`` in company, where each gets the
    answer of the ``other`` next request."""
    alone = [[answer(-1.0, -1.0 - 3 * i, -5.0)] * 3 for i in range(8)]
    together = [[answer(-1.0 + moved, -1.0 - 3 * i, -5.0)] * 3 for i in range(8)]
    return checks_server.Company(alone, together[other:] + together[:other])


def test_images_are_held_against_texts_in_the_same_company() -> None:
    texts = company(0.5)
    assert checks_server.judge_company(company(0.9), texts)[0]
    assert not checks_server.judge_company(company(1.1), texts)[0]
    assert checks_server.judge_company(company(1.1), company(0.6))[0]


def test_an_answer_to_another_picture_is_found() -> None:
    texts = company(20.0)  # whatever moves
    assert checks_server.judge_company(company(0.1), texts)[0]
    good, words = checks_server.judge_company(company(0.1, other=1), texts)
    assert not good
    assert "nearest to the same picture alone: 0 of 24" in words


def test_what_texts_move_beyond_measure_excuses_no_picture() -> None:
    texts = company(0.5)
    texts.together[3][0] = Answer("z", 1, [{"z": -0.1}])
    assert checks_server.judge_company(company(0.9), texts)[0]
    assert not checks_server.judge_company(company(1.1), texts)[0]


def test_answers_that_share_no_alternatives_moved_beyond_measure() -> None:
    left, right = Answer("a", 1, [{"a": -0.1, "b": -3.0}]), Answer("c", 1, [{"c": -0.1, "b": -3.0}])
    assert checks_server.first_moved(left, right) == float("inf")
    assert checks_server.first_moved(left, left) == 0


def test_streams_that_start_together_may_change_places() -> None:
    stock = [["a", "b"], ["c", "c"], ["d"]]
    assert compare_text.kernel_lists(stock, [["a", "b"], ["d"], ["c", "c"]])[0]
    assert not compare_text.kernel_lists(stock, [["b", "a"], ["c", "c"], ["d"]])[0]
    assert not compare_text.kernel_lists(stock, [["a", "b"], ["c"], ["c", "d"]])[0]
    assert compare_text.changes(stock, [["d"], ["a", "x", "b"], ["c", "c"]]) == (["x"], [])
    assert compare_text.changes(stock, [["a", "b"], ["c", "c"]]) == ([], ["d"])


def greedy(*steps: tuple[float, float]) -> answers.Answer:
    """Two tokens' log-probabilities at each step; the likelier one is taken."""
    choices = [dict(enumerate(chances)) for chances in steps]
    return answers.Answer([max(row, key=row.__getitem__) for row in choices], choices)


def test_an_answer_may_part_from_repeats_by_their_own_noise() -> None:
    repeats = [greedy((-1.0, -2.0), (-0.7, -0.8)), greedy((-1.0, -2.0), (-0.9, -0.6))]
    noise = answers.noise_of([repeats])
    assert abs(noise - 0.4) < 1e-9
    assert answers.as_repeated(repeats[1], repeats[:1], 0.0)[0] is False
    assert answers.as_repeated(repeats[1], repeats, 0.0)[0]
    assert answers.as_repeated(greedy((-1.0, -2.0), (-0.8, -0.6)), repeats[:1], noise)[0]
    assert not answers.as_repeated(greedy((-2.0, -1.0), (-0.7, -0.8)), repeats, noise)[0]
