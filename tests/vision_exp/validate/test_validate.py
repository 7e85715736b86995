"""The validator passes a right server, fails the one check that a fault touches, claims no more."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from vision_exp.validate import checks, client, images, metrics, run
from vision_exp.validate.__main__ import main
from vision_exp.validate.client import Client

sys.path.insert(0, str(Path(__file__).parent))

import fake_model
import fake_server

#: The largest ones cost seconds each to pack.
FEWER_SHAPES = [(1, 1), (640, 480), (2000, 200), (20, 1000)]
NO_ANSWERS = {"what cancelled requests leave"}
CONTENT_CHECKS = {"each request its own image", "positions in an image"}
STATUS_CHECKS = {
    "an image in a system message",
    "images of all shapes",
    "formats and colour modes",
}
CHECKS = {check.name: check for check in checks.CHECKS}
COMPARING_CHECKS = set(CHECKS) - CONTENT_CHECKS - STATUS_CHECKS - NO_ANSWERS


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "SHAPES", FEWER_SHAPES)
    monkeypatch.setattr(metrics, "PATIENCE", 2.0)


def _states(url: str, folder: Path) -> tuple[int, dict[str, str], dict]:
    out = folder / "result.json"
    code = main(["--url", url, "--json", str(out)])
    found = json.loads(out.read_text())
    return code, {check["name"]: check["state"] for check in found["checks"]}, found


def _run(name: str, url: str) -> dict[str, Any]:
    async def explored() -> dict[str, Any]:
        return await run.run(CHECKS[name], await run.explore(checks.Session(url)))

    return asyncio.run(explored())


def test_a_right_server_passes_everything(tmp_path: Path) -> None:
    with fake_server.serving() as url:
        code, states, found = _states(url, tmp_path)
    assert set(states) == set(CHECKS)
    failures = {c["name"]: c["detail"] for c in found["checks"] if c["state"] != "passed"}
    assert not failures
    assert code == 0
    assert found["trained"]
    assert all(check["compared"] for check in found["checks"])


@pytest.mark.parametrize("fault", fake_model.FAULTS)
def test_a_fault_fails_its_check(fault: str) -> None:
    with fake_server.serving(fault) as url:
        found = _run(fake_model.FAULTS[fault], url)
    assert found["state"] == "failed", found


def test_an_image_that_a_refused_request_spoils() -> None:
    with fake_server.serving("unaccepted images lost") as url:
        found = _run("an image after a request that ended early", url)
    assert found["state"] == "failed" and "HTTP 500" in found["detail"], found


def test_a_failed_check_is_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = fake_model.FAULTS["order ignored"]
    monkeypatch.setattr(run, "CHECKS", (CHECKS[name],))
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


@pytest.mark.parametrize("mind", ["letters", "letters with chances", "empty", "exact and blind"])
def test_a_server_that_shows_nothing_passes_no_comparison(mind: str, tmp_path: Path) -> None:
    with fake_server.serving(trained=False, mind=mind) as url:
        code, states, found = _states(url, tmp_path)
    passed = {name for name, state in states.items() if state == "passed"}
    assert passed == STATUS_CHECKS | NO_ANSWERS
    assert set(states.values()) == {"passed", "skipped"}
    assert code == 0
    for check in found["checks"]:
        if check["name"] in COMPARING_CHECKS:
            assert "could be judged" in check["detail"]


def test_a_noisy_server_is_judged_by_its_own_repeats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_server.serving(trained=False, mind="noisy") as url:
        code, states, found = _states(url, tmp_path)
    assert {name for name, state in states.items() if state == "passed"} >= COMPARING_CHECKS
    assert 0.5 < found["noise_nats"] < 2
    assert code == 0
    assert "it is not reproducible" in capsys.readouterr().out


def test_noise_does_not_hide_a_mixed_up_picture() -> None:
    with fake_server.serving("pictures mixed up", trained=False, mind="noisy") as url:
        found = _run("two concurrent image requests", url)
    assert found["state"] == "failed", found


def test_noise_that_hides_the_picture_is_the_reason() -> None:
    with fake_server.serving(trained=False, mind="noisy and blind") as url:
        found = _run("three concurrent image requests", url)
    assert found["state"] == "skipped"
    assert "only 0 of 3 could be judged" in found["detail"]
    assert "an answer to another image is" in found["detail"]


def test_swapped_pictures_that_are_answered_alike_show_no_order() -> None:
    with fake_server.serving(trained=False, mind="exact and blind") as url:
        found = _run("images in another order", url)
    assert found["state"] == "skipped"
    assert "another image is 0.00 nats from it" in found["detail"]


def test_equal_words_with_other_chances_are_other_answers() -> None:
    with fake_server.serving("co-batching moves chances") as url:
        found = _run("two concurrent image requests", url)
    assert found["state"] == "failed"
    assert "2 of 2 texts equal" in found["detail"]


def test_a_stream_that_is_complete_is_not_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LISTEN", 2.0)  # for a machine that is busy
    with fake_server.serving("short streams") as url:
        found = _run("a cancelled request", url)
    assert found["state"] == "skipped"
    assert "nothing was hung up on" in found["detail"]


def test_hanging_up_before_the_first_token_is_said_only_where_it_happened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_server.serving() as url:
        assert "a third before its first token" in _run("a cancelled request", url)["compared"]
    monkeypatch.setattr(client, "EARLY", 1.0)
    with fake_server.serving("no prefill") as url:
        found = _run("a cancelled request", url)
    assert found["state"] == "passed"
    assert "first token" not in found["compared"]
    assert "none before its first" in found["detail"]


def test_what_a_stream_told_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    content = checks.shows("red", 1)
    expected = {
        "": ("", ""),
        "short streams": ("the stream was complete", ""),
        "error in the stream": ("", "{'message': 'no'}"),
        "reply not streamed": ("the reply was no stream of events", ""),
    }
    for fault, (ended, error) in expected.items():
        monkeypatch.setattr(client, "LISTEN", 2.0 if fault else 0.05)
        with fake_server.serving(fault) as url:
            cut = asyncio.run(Client(url).cancel(content))
        assert cut.error == error
        if not error:  # after which nothing is read
            assert cut.ended.startswith(ended) and bool(cut.ended) == bool(ended)


def test_a_thinking_server_is_asked_not_to_think(tmp_path: Path) -> None:
    with fake_server.serving(mind="thinks") as url:
        code, states, found = _states(url, tmp_path)
    assert set(states.values()) == {"passed"}
    assert found["trained"]
    assert code == 0


def test_a_server_that_only_thinks_is_called_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_server.serving(mind="always thinks") as url:
        _, states, found = _states(url, tmp_path)
    reason = "reasoning and no content within 16 tokens, although it was asked not to think"
    assert reason in capsys.readouterr().out
    for check in found["checks"]:
        if check["name"] in CONTENT_CHECKS:
            assert check["state"] == "skipped" and reason in check["detail"]


@pytest.mark.parametrize(
    ("fault", "fields"),
    [
        ("", run.FIELDS[0]),
        ("few alternatives", run.FIELDS[1]),
        ("strict", run.FIELDS[2]),
    ],
)
def test_a_server_gets_the_fields_that_it_takes(fault: str, fields: dict[str, Any]) -> None:
    with fake_server.serving(fault) as url:
        found = asyncio.run(run.explore(checks.Session(url)))
    assert found.fields == fields
    assert not found.incoherent_reason
    assert bool(found.warm_reason) == (fault == "strict")


def test_without_a_salt_the_cache_is_named() -> None:
    with fake_server.serving("strict") as url:
        assert "server's cache" in _run("two concurrent image requests", url)["compared"]
        found = _run("a prefix fork", url)
    assert found["state"] == "skipped" and "cache_salt" in found["detail"]


@pytest.mark.parametrize(
    ("text", "colours"),
    [
        ("Red", ["red"]),
        ("**RED.** The disc is red, on grey.", ["red"]),
        ("The coloured discs are blue, red", ["blue", "red"]),
        ("reddish, considered, blackboard", []),
        ("red green_1 blue-yellow", ["red", "green", "blue", "yellow"]),
    ],
)
def test_colours_are_whole_words(text: str, colours: list[str]) -> None:
    assert images.colours_named(text) == colours


@pytest.mark.parametrize("name", ["each request its own image", "one image at every offset"])
def test_an_answer_that_names_every_colour_is_wrong(name: str) -> None:
    with fake_server.serving("every colour named") as url:
        found = _run(name, url)
    assert found["state"] == "failed" and "red, green, blue" in found["detail"]


@pytest.mark.parametrize(
    "name",
    [
        "each request its own image",
        "one image at every offset",
        "images in another order",
    ],
)
def test_right_answers_in_sentences_are_right(name: str) -> None:
    with fake_server.serving("wordy") as url:
        assert _run(name, url)["state"] == "passed"


def test_a_salt_that_is_ignored_passes_no_prefix_fork() -> None:
    with fake_server.serving("salt ignored") as url:
        found = _run("a prefix fork", url)
    assert found["state"] == "skipped"
    assert "the other question is 0.00 nats from it" in found["detail"]
    assert "with a fresh cache_salt, which vLLM honours" in found["compared"]


def test_only_places_that_were_read_are_said_to_be_compared() -> None:
    with fake_server.serving("right side unseen") as url:
        found = _run("positions in an image", url)
    assert "20 of 25 places" in found["compared"]
    assert "a whole row or column" in found["detail"] and "cannot see" in found["detail"]


def test_a_busy_server_is_not_judged() -> None:
    fake_model.BUSY.clear()
    with fake_server.serving("busy at last") as url:
        explored = asyncio.run(run.explore(checks.Session(url)))
        fake_model.BUSY.set()
        found = [asyncio.run(run.run(check, explored)) for check in CHECKS.values()]
    assert {check["state"] for check in found} == {"skipped"}
    assert all("/chat/completions answers HTTP 429: " in check["detail"] for check in found)


def test_a_server_that_takes_one_request_at_a_time_is_judged_by_those(tmp_path: Path) -> None:
    with fake_server.serving("busy when co-batched") as url:
        code, states, _ = _states(url, tmp_path)
    assert code == 0
    assert states.pop("two concurrent image requests") == "skipped"
    assert states.pop("three concurrent image requests") == "skipped"
    assert set(states.values()) <= {"passed", "skipped"}
    assert states["images of all shapes"] == states["positions in an image"] == "passed"
