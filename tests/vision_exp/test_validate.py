"""The validator passes a right server, fails the one check that a fault touches, claims no more."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

from vision_exp import validate, validate_judge, validate_pictures
from vision_exp.validate_client import Answer, Client

sys.path.insert(0, str(Path(__file__).parent))

import fake_server

#: The largest ones cost seconds each to pack.
FEWER_SHAPES = [(1, 1), (640, 480), (2000, 200), (20, 1000)]
CONTENT_CHECKS = {"each request its own picture", "positions in a picture"}


@pytest.fixture(autouse=True)
def fewer_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate_pictures, "SHAPES", FEWER_SHAPES)


def _states(url: str, folder: Path) -> tuple[int, dict[str, str], dict]:
    out = folder / "result.json"
    code = validate.main(["--url", url, "--json", str(out)])
    found = json.loads(out.read_text())
    return code, {check["name"]: check["state"] for check in found["checks"]}, found


def test_a_right_server_passes_everything(tmp_path: Path) -> None:
    with fake_server.serving() as url:
        code, states, found = _states(url, tmp_path)
    assert set(states) == set(validate.CHECKS)
    failures = {c["name"]: c["detail"] for c in found["checks"] if c["state"] != "passed"}
    assert not failures
    assert code == 0
    assert found["trained"]
    assert all(check["compared"] for check in found["checks"])


@pytest.mark.parametrize("fault", fake_server.FAULTS)
def test_a_fault_fails_its_check(fault: str) -> None:
    name = fake_server.FAULTS[fault]
    with fake_server.serving(fault) as url:
        lab = validate.enter(Client(url))
        found = validate.run(name, validate.CHECKS[name], lab)
    assert found["state"] == "failed", found


def test_a_failed_check_is_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = fake_server.FAULTS["order ignored"]
    monkeypatch.setattr(validate, "CHECKS", {name: validate.CHECKS[name]})
    with fake_server.serving("order ignored") as url:
        code, states, _ = _states(url, tmp_path)
    assert states == {name: "failed"}
    assert code == 1


def test_random_weights_skip_content_and_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_server.serving(trained=False) as url:
        code, states, found = _states(url, tmp_path)
    assert {name for name, state in states.items() if state == "skipped"} == CONTENT_CHECKS
    assert code == 0
    assert not found["trained"]
    assert "checks of content will be skipped" in capsys.readouterr().out


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert validate.main(["--url", "http://127.0.0.1:9/v1", "--timeout", "2"]) == 3
    assert "no usable server" in capsys.readouterr().err


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
    monkeypatch.setattr(validate, "CHECKS", {name: validate.CHECKS[name]})
    with fake_server.serving() as url:
        code, states, found = _states(url, tmp_path)
    assert "it is not reproducible" in capsys.readouterr().out
    assert found["noise_nats"] == pytest.approx(4.8)
    assert code == 0 and states[name] in ("passed", "skipped")
    assert "could be judged" in found["checks"][0]["compared"] or states[name] == "passed"


def test_slope() -> None:
    true = [10.0, 30.0, 50.0, 70.0, 90.0]
    assert validate_judge.slope(true, [50 + 0.3 * (t - 50) for t in true]) == pytest.approx(0.3)
