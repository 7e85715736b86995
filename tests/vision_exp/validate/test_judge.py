"""When two answers count as the same, and when nothing is concluded."""

from __future__ import annotations

import json
import math

import pytest

from vision_exp.validate.client import Answer, BadReply, Chat
from vision_exp.validate.judge import (
    Noise,
    Reference,
    all_same,
    both,
    distance,
    judge,
    noise_of,
)

RED = {"red": -0.1, "blue": -2.5}
BLUE = {"blue": -0.1, "red": -2.5}


def _answer(text: str, *tokens: dict[str, float]) -> Answer:
    return Answer(text, 1, list(tokens))


def _against(*alone: Answer, other: Answer) -> Reference:
    return Reference(list(alone), [other])


def _good(answer: Answer, reference: Reference, noise: Noise | None = None) -> bool | None:
    return judge(answer, reference, (noise or Noise()) + noise_of(reference.alone))[0]


def test_distance() -> None:
    left = _answer("a", {"a": -0.5, "b": -1.5})
    right = _answer("b", {"b": -0.4, "a": -1.6})
    assert distance(left, left).nats == 0
    assert distance(left, right).nats == pytest.approx(2.2)
    assert distance(left, _answer("z", {"z": -0.1})).nats == math.inf
    assert distance(_answer("a"), _answer("b")).nats == math.inf
    assert distance(_answer("a"), _answer("a")).nats == 0


def test_one_shared_token_moves_too() -> None:
    """A difference of two tokens needs two; the chosen token's own chance is there always."""
    assert distance(_answer("a", {"a": -0.1}), _answer("a", {"a": -3.0})).nats == pytest.approx(2.9)


def test_unlikely_tokens_are_not_looked_at() -> None:
    left, right = {"a": -0.01, "b": -9.0}, {"a": -0.01, "b": -12.0}
    assert distance(_answer("a", left), _answer("a", right)).nats == 0


def test_answers_after_the_parting_are_not_looked_at() -> None:
    left = _answer("ab", {"a": -0.7, "x": -0.8}, {"b": -0.1})
    right = _answer("xy", {"x": -0.7, "a": -0.8}, {"y": -0.1})
    assert distance(left, right).nats == pytest.approx(0.2)


def test_near_ties_count_as_the_same_and_others_do_not() -> None:
    reference = _against(_answer("a", {"a": -0.7, "b": -0.9}), other=_answer("z", {"z": -0.1}))
    assert _good(_answer("b", {"b": -0.8, "a": -0.9}), reference) is True
    assert _good(_answer("b", {"b": -0.1, "a": -3.0}), reference) is False
    assert _good(_answer("c", {"c": -0.1}), reference) is False


def test_a_token_that_is_not_listed_may_be_noise_where_those_listed_lie_close() -> None:
    def listed(*names: str) -> dict[str, float]:  # of many tokens, all about as likely
        return {name: -5 - index / 10 for index, name in enumerate(names)}

    alone, stranger = _answer("a", listed("a", "b", "c")), _answer("x", listed("x", "y", "z"))
    assert distance(alone, stranger).nats == math.inf
    assert distance(alone, stranger).lower_bound == pytest.approx(0.4)
    # Whether it is the answer judged or the control that nothing can be said of.
    far = _answer("q", {"q": -0.01})
    assert _good(stranger, _against(alone, other=far)) is None
    assert _good(alone, _against(alone, other=stranger)) is None
    assert _good(alone, _against(alone, other=far)) is True
    assert _good(far, _against(alone, other=far)) is False


def test_what_is_listed_bounds_what_is_not() -> None:
    alone, sure = _answer("a", {"a": -0.1}), _answer("b", {"b": -0.2})
    left = math.log(1 - math.exp(-0.1)), math.log(1 - math.exp(-0.2))
    assert distance(alone, sure).lower_bound == pytest.approx(-0.3 - sum(left))
    assert distance(_answer("a"), _answer("b")).lower_bound == math.inf


def test_equal_text_does_not_hide_other_log_probabilities() -> None:
    reference = _against(_answer("red", RED), other=_answer("blue", BLUE))
    moved = _answer("red", {"red": -0.6, "blue": -0.7})
    assert _good(_answer("red", RED), reference) is True
    assert _good(moved, reference) is False


def test_equal_log_probabilities_do_not_hide_other_text() -> None:
    reference = _against(_answer("red", RED), other=_answer("blue", BLUE))
    assert _good(_answer("redder", RED), reference) is False


def test_empty_answers_prove_nothing() -> None:
    empty = _answer("")
    good, words = judge(empty, _against(empty, empty, other=_answer("b")), Noise())
    assert good is None
    assert "empty answers" in words
    assert _good(_answer("red"), _against(empty, empty, other=empty)) is False
    assert _good(empty, _against(_answer("red"), other=_answer("blue"))) is False
    # Without text, but with log-probabilities: those are compared.
    silent, other = _answer("", {"": -0.1, "x": -3.0}), _answer("", {"": -2.0, "x": -0.2})
    assert _good(silent, _against(silent, other=other)) is True


def test_reasoning_is_compared_where_there_is_no_text() -> None:
    left, right = (Answer("", 1, [], f"I see {colour}") for colour in ("red", "blue"))
    assert _good(left, _against(left, other=right)) is True
    assert _good(right, _against(left, other=right)) is False


def test_noise_is_the_furthest_from_the_nearest_repeat() -> None:
    repeats = [_answer("a", {"a": -chance, "b": -2.0}) for chance in (0.1, 0.2, 0.7)]
    assert noise_of(repeats).moved == pytest.approx(0.5)
    assert noise_of([*repeats, _answer("z")]) == Noise(noise_of(repeats).moved, 1, 4)
    assert noise_of([_answer("a"), _answer("b")]) == Noise(0.0, 2, 2)
    assert noise_of(repeats[:1]) == Noise()
    assert Noise(0.5, 1, 4) + Noise(0.2, 2, 3) == Noise(0.5, 3, 7)


def test_repeats_widen_the_limit_only_where_other_pictures_stay_beyond() -> None:
    alone = [_answer("a", {"a": -chance, "b": -2.0}) for chance in (0.1, 0.9)]
    near, far = _answer("a", {"a": -2.0, "b": -2.0}), _answer("b", {"b": -0.1, "a": -4.0})
    assert _good(near, _against(*alone, other=far)) is True  # 1.1 from the nearest, limit 1.6
    assert _good(far, _against(*alone, other=far)) is False
    good, words = judge(alone[0], _against(*alone, other=near), noise_of(alone))
    assert good is None
    assert "a wrong answer would not be distinguishable" in words


def test_incomparable_repeats_make_incomparable_answers_prove_nothing() -> None:
    """Neither that an answer is wrong, nor that another picture's answer is told from it."""
    some = Noise(0.0, 1, 12)
    reference = _against(_answer("a"), other=_answer("b"))
    assert _good(_answer("c"), reference) is False
    good, words = judge(_answer("c"), reference, some)
    assert good is None and "1 of 12 repeats" in words
    good, words = judge(_answer("a"), reference, some)
    assert good is None and "would not be distinguishable" in words


def test_an_answer_to_another_picture_that_is_the_same_tells_nothing() -> None:
    same = _answer("red")
    assert _good(same, _against(same, other=same)) is None


def test_all_pairs_have_to_be_judged() -> None:
    red, blue = _answer("red", RED), _answer("blue", BLUE)
    told, untold = _against(red, other=blue), _against(red, other=red)
    assert all_same([(red, told)] * 2, Noise())[0] is True
    good, words = all_same([(red, told), (red, untold)], Noise())
    assert good is None
    assert "2 of 2 texts equal" in words and "only 1 of 2 could be judged" in words
    assert all_same([(red, untold), (blue, told)], Noise())[0] is False
    assert both(None, False) is False
    assert both(None, True) is None


def _reply(**fields: object) -> dict[str, object]:
    token = {"token": "�", "logprob": -0.3}
    others = [token, {"token": "�", "logprob": -0.9}, {"token": "a", "logprob": -2}]
    message = {"content": None, "reasoning_content": "hmm"}
    choice = {"message": message, "logprobs": {"content": [token | {"top_logprobs": others}]}}
    return {"choices": [choice], "usage": {"prompt_tokens": 7}} | fields


def test_replies_are_read() -> None:
    answer = Chat.read(json.dumps(_reply()).encode(), "here").answer()
    assert answer == Answer("", 7, [{"�": -0.3, "a": -2}], "hmm")
    assert next(iter(answer.tokens[0])) == "�"


@pytest.mark.parametrize(
    "fields",
    [
        {"usage": None},
        {"usage": {"prompt_tokens": "7"}},
        {"choices": [None]},
        {"choices": [{"message": {"content": 7}}]},
        {"choices": [{"message": {}, "logprobs": {"content": [{"token": "a", "logprob": None}]}}]},
        {"choices": [{"message": {}, "logprobs": {"content": ["a"]}}]},
    ],
)
def test_malformed_replies_are_named(fields: dict[str, object]) -> None:
    with pytest.raises(BadReply, match="here sent a malformed reply"):
        Chat.read(json.dumps(_reply() | fields).encode(), "here")
