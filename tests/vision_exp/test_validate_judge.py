"""When two answers count as the same, and when nothing is concluded."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

from vision_exp import validate, validate_judge, validate_run
from vision_exp.validate_client import Client
from vision_exp.validate_reply import Answer, BadReply, answer_of

sys.path.insert(0, str(Path(__file__).parent))

import fake_server


def _states(url: str, folder: Path) -> tuple[int, dict[str, str], dict]:
    out = folder / "result.json"
    code = validate.main(["--url", url, "--json", str(out)])
    found = json.loads(out.read_text())
    return code, {check["name"]: check["state"] for check in found["checks"]}, found


def _answer(text: str, *tokens: dict[str, float]) -> Answer:
    return Answer(text, 1, list(tokens))


def test_near_ties_count_as_the_same_and_others_do_not() -> None:
    left = _answer("ab", {"a": -0.1, "x": -3.0}, {"b": -0.7, "c": -0.8})
    tie = _answer("ac", {"a": -0.1, "x": -3.0}, {"c": -0.7, "b": -0.8})
    wide = _answer("x", {"x": -0.1, "a": -3.0})
    alien = _answer("z", {"z": -0.1})
    assert validate_judge.same(left, left)[0]
    assert validate_judge.same(left, tie)[0]
    assert not validate_judge.same(left, wide)[0]
    assert not validate_judge.same(left, alien)[0]
    assert not validate_judge.same(left, _answer("ac"))[0]


def test_what_a_server_does_to_itself_is_not_judged() -> None:
    left = _answer("a", {"a": -0.5, "b": -1.5})
    right = _answer("b", {"b": -0.4, "a": -1.6})
    alien = _answer("z", {"z": -0.1})
    tie = _answer("b", {"b": -0.9, "a": -1.1})
    assert validate_judge.movement(left, left) == 0
    assert validate_judge.movement(left, right) == pytest.approx(2.2)
    assert validate_judge.movement(left, alien) == float("inf")
    assert validate_judge.judge(left, right, 1.0)[0] is False
    assert validate_judge.judge(left, right, 1.2)[0] is None
    assert validate_judge.judge(left, alien, 0.4)[0] is False
    assert validate_judge.judge(left, alien, 0.6)[0] is None
    every = validate_judge.all_same([(left, right)] * 2, "x", 1.2)
    assert every.state == "skipped" and "0 of 2 could be judged" in every.compared
    some = validate_judge.all_same([(left, right), (left, left)], "x", 1.2)
    assert some.state == "passed" and "1 of 2 could be judged" in some.compared
    one_wrong = validate_judge.all_same([(left, tie), (left, alien)], "x", 0.4)
    assert one_wrong.state == "failed"
    assert validate_judge.both(None, False) is False
    assert validate_judge.both(None, True) is None


def test_noise_of_a_server_is_measured_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "two concurrent image requests"
    turns = itertools.count()

    def varying(self: Client, content: list, **options: object) -> Answer:
        first, second = ("a", "b") if next(turns) % 2 else ("b", "a")
        return _answer(first, {first: -0.1, second: -2.5})

    monkeypatch.setattr(Client, "ask", varying)
    monkeypatch.setattr(validate_run, "CHECKS", {name: validate_run.CHECKS[name]})
    with fake_server.serving() as url:
        code, states, found = _states(url, tmp_path)
    assert "it is not reproducible" in capsys.readouterr().out
    assert found["noise_nats"] == pytest.approx(4.8)
    assert code == 0 and states[name] in ("passed", "skipped")
    assert "could be judged" in found["checks"][0]["compared"] or states[name] == "passed"


def test_slope() -> None:
    true = [10.0, 30.0, 50.0, 70.0, 90.0]
    assert validate_judge.slope(true, [50 + 0.3 * (t - 50) for t in true]) == pytest.approx(0.3)


def _reply(**fields: object) -> dict[str, object]:
    token = {"token": "�", "logprob": -0.3}
    others = [token, {"token": "�", "logprob": -0.9}, {"token": "a", "logprob": -2}]
    message = {"content": None, "reasoning_content": "hmm"}
    choice = {"message": message, "logprobs": {"content": [token | {"top_logprobs": others}]}}
    return {"choices": [choice], "usage": {"prompt_tokens": 7}} | fields


def test_replies_are_read() -> None:
    answer = answer_of(_reply(), "here")
    assert answer == Answer("", 7, [{"�": -0.3, "a": -2}], "hmm")
    assert next(iter(answer.tokens[0])) == "�"


@pytest.mark.parametrize(
    "odd",
    [
        {"usage": None},
        {"usage": {"prompt_tokens": "7"}},
        {"choices": [None]},
        {"choices": [{"message": {"content": 7}}]},
        {"choices": [{"message": {}, "logprobs": {"content": [{"token": "a", "logprob": None}]}}]},
        {"choices": [{"message": {}, "logprobs": {"content": ["a"]}}]},
    ],
)
def test_odd_replies_are_named(odd: dict[str, object]) -> None:
    with pytest.raises(BadReply, match="here replied oddly"):
        answer_of(_reply() | odd, "here")
