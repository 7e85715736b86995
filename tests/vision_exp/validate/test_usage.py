"""The validator's command line: what cannot be done is said first, with what to type, and never
looks like a failed check."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from vision_exp.validate import command, run
from vision_exp.validate.__main__ import main
from vision_exp.validate.checks import CHECKS, Check, Session
from vision_exp.validate.client import Refused, TooLate
from vision_exp.validate.judge import Verdict
from vision_exp.validate.run import no_server

sys.path.insert(0, str(Path(__file__).parent))

import fake_server

#: Nothing listens there: what gets as far as asking it ends with exit 3.
NOBODY = "http://127.0.0.1:9/v1"


def _refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, first and last line of what is said."""
    code = main(list(argv))
    lines = capsys.readouterr().err.splitlines()
    assert not any("Traceback" in line for line in lines)
    assert lines[0].startswith("[vision-exp] ")
    assert "Nothing was checked." in lines[0]
    assert lines[-1].startswith("next: ")
    return code, lines[0], lines[-1]


@pytest.mark.parametrize(
    ("argv", "cause", "hint"),
    [
        ([], "--url", "--url http://HOST:PORT/v1"),
        (["--url", ""], "no host", "--url http://HOST:PORT/v1"),
        (["--url", "127.0.0.1:8000/v1"], "has no scheme: add http://", "http://127.0.0.1:8000/v1"),
        (["--url", "localhost:8000/v1"], "has no scheme: add http://", "http://localhost:8000/v1"),
        (["--url", "http://h:notaport/v1"], "'notaport'", "--url http://HOST:PORT/v1"),
        (["--url", "http://h:70000/v1"], "0-65535", "--url http://HOST:PORT/v1"),
        (["--url", "http://[::1/v1"], "http://[::1/v1", "--url http://HOST:PORT/v1"),
        (["--url", "http://a b/v1"], "characters", "--url http://HOST:PORT/v1"),
        (["--url", "ftp://h/v1"], "scheme ftp", "--url http://HOST:PORT/v1"),
        (["--url", "http://h/v1?key=1"], "base URL", "--url http://HOST:PORT/v1"),
        (["--url", "http://h/v1?"], "base URL", "--url http://HOST:PORT/v1"),
        (["--url", "http://h/v1#"], "base URL", "--url http://HOST:PORT/v1"),
        (["--url", "http://me:secret@h/v1"], "user name", "--api-key KEY"),
        (["--url", NOBODY, "--timeout", "-1"], "--timeout -1", "--timeout 120"),
        (["--url", NOBODY, "--timeout", "nan"], "--timeout nan", "--timeout 120"),
        (["--url", NOBODY, "--timeout", "soon"], "--timeout soon", "--timeout 120"),
        (["--url", NOBODY, "--api-key", "ab\ncd"], "--api-key has a line break", "--api-key"),
        (["--url", NOBODY, "--api-key", "schlüssel"], "--api-key", "--api-key"),
        (["--url", NOBODY, "--verbose"], "--verbose", "--help"),
    ],
)
def test_bad_usage(
    argv: list[str], cause: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, first, last = _refusal(capsys, *argv)
    assert code == command.USAGE
    assert cause in first
    assert hint in last
    assert "secret" not in first and "cd" not in first.partition("--api-key")[2]


def test_a_file_for_the_result_is_looked_at_before_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, first, last = _refusal(capsys, "--url", NOBODY, "--json", str(tmp_path))
    assert code == command.USAGE
    assert "is a folder" in first and f"--json {tmp_path / 'validate.json'}" in last
    missing = tmp_path / "none"
    code, first, last = _refusal(capsys, "--url", NOBODY, "--json", str(missing / "a.json"))
    assert code == command.USAGE
    assert f"there is no folder {missing}" in first and last == f"next: mkdir -p {missing}"
    assert not missing.exists()
    code, _, _ = _refusal(capsys, "--url", NOBODY, "--json", str(tmp_path / "a.json"))
    assert code == command.NO_SERVER
    assert not (tmp_path / "a.json").exists()


def test_a_result_that_cannot_be_written_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "folder" / "a.json"
    out.parent.mkdir()

    async def removes(session: Session) -> Verdict:
        out.parent.rmdir()
        return Verdict(True, "nothing", "")

    monkeypatch.setattr(run, "CHECKS", (Check("the folder goes", removes),))
    with fake_server.serving() as url:
        assert main(["--url", url, "--json", str(out)]) == command.NOT_WRITTEN
    assert "cannot be written" in capsys.readouterr().err.splitlines()[0]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no model", "/models {}data.0.id: Field required"),
        ("no usage", "/chat/completions {}usage.prompt_tokens: Field required"),
        ("no choices", "/chat/completions {}choices.0.message: Field required"),
        (
            "no JSON",
            "/chat/completions {}Invalid JSON: expected value at line 1 column 1, got b'<h",
        ),
    ],
)
def test_malformed_replies(fault: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server.serving(fault) as url:
        code, first, _ = _refusal(capsys, "--url", url)
    assert code == command.NO_SERVER
    assert url + words.format("sent a malformed reply: ") in first


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    code, first, last = _refusal(capsys, "--url", NOBODY, "--timeout", "2")
    assert code == command.NO_SERVER
    assert "no usable server" in first and NOBODY in first
    assert f"curl {NOBODY}/models" in last


@pytest.mark.parametrize("host", ["[fe80::1%25nowhere]", "x" * 70, ".odd"])
def test_hosts_that_cannot_be(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, _ = _refusal(capsys, "--url", f"http://{host}/v1", "--timeout", "2")
    assert code == command.NO_SERVER


def test_a_base_url_without_its_path(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server.serving("paths count") as url:
        code, first, last = _refusal(capsys, "--url", url.removesuffix("/v1"))
    assert code == command.NO_SERVER
    assert "HTTP 404" in first and "/v1" in last


def test_help_names_the_exit_codes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vision_exp.validate", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    for code in ("0    no check failed", "1    a check failed", "2    bad usage", "3    no usable"):
        assert code in done.stdout


def test_an_error_of_the_tool_is_no_failed_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(run, "everything", broken)
    with pytest.raises(SystemExit) as stopped:
        main(["--url", NOBODY])
    assert stopped.value.code == command.UNEXPECTED
    assert "an error inside this tool" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fault", "cause", "hint"),
    [
        ("no pictures", "answers text but takes no image: HTTP 400", "hotfix.py status"),
        ("no pictures", "At most 0 image(s)", "--limit-mm-per-prompt"),
        ("pictures break", "answers text but fails at an image: HTTP 500", "server's log"),
        ("busy", "HTTP 429", "later: the server is busy"),
        ("images dropped", "prompt tokens, and no more with an image", "hotfix.py status"),
        ("images unseen", "answers 'red' to discs of three colours", "hotfix.py status"),
    ],
)
def test_servers_of_no_use_get_a_next_step(
    fault: str, cause: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_server.serving(fault) as url:
        code, first, last = _refusal(capsys, "--url", url)
    assert code == command.NO_SERVER
    assert cause in first and "Nothing was checked." in first
    assert hint in last
    blind = first.startswith("[vision-exp] this server does not see images: ")
    assert blind == (fault != "busy")


def test_what_runs_long_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def slow(session: Session) -> Verdict:
        await asyncio.sleep(0.5)
        return Verdict(True, "nothing", "")

    monkeypatch.setattr(run, "TICK", 0.2)
    monkeypatch.setattr(run, "CHECKS", (Check("first", slow), Check("second", slow)))
    with fake_server.serving() as url:
        assert main(["--url", url]) == command.FINE
    told = capsys.readouterr().err.splitlines()
    assert "[vision-exp] check 1 of 2, first: 0.2 s so far" in told
    assert "[vision-exp] check 2 of 2, second: 0.4 s so far" in told


def test_a_redirect_and_a_slow_server_get_a_next_step() -> None:
    options = command.Options("http://h/v1", "m o", "secret", 2000, Path("a.json"))
    moved = no_server(
        options, Refused("http://h/v1/models", 301, "", "https://else/base/v1/models")
    )
    assert "answers HTTP 301 to https://else/base/v1/models. Nothing" in str(moved)
    assert "--url https://else/base/v1 " in moved.hint
    slow = no_server(options, TooLate("late")).hint
    asked = "--url http://h/v1 --model 'm o' --api-key KEY --timeout 4000 --json a.json"
    assert f"{command.COMMAND} {asked} " in slow


def test_a_servers_words_stay_on_their_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "CHECKS", ())
    forged = "m\n\x1b[2Jpassed   everything"
    with fake_server.serving(name=forged) as url:
        assert main(["--url", url]) == command.FINE
    with fake_server.serving("no pictures", name=forged) as url:
        assert main(["--url", url]) == command.NO_SERVER
    told = capsys.readouterr()
    assert "\x1b" not in told.out + told.err
    lines = (told.out + told.err).splitlines()
    assert not any(line.startswith("passed") for line in lines)
    assert sum("m\\n\\x1b[2Jpassed" in line for line in lines) == 3


def test_an_earlier_result_does_not_outlive_a_run(tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    out.write_text('{"failed": 0}')
    # Refused before anything is asked: the options were not accepted.
    assert main(["--url", "x", "--json", str(out)]) == command.USAGE
    assert out.exists()
    assert main(["--url", NOBODY, "--json", str(out)]) == command.NO_SERVER
    assert not list(tmp_path.iterdir())


def test_a_result_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"

    def full(file: Path, text: str) -> int:
        file.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(command.Stop, match="No space left on device"):
        command.write(command.Options("http://h", json=path), {"failed": 0})
    assert not list(tmp_path.iterdir())


def test_a_device_for_the_result_stays() -> None:
    path = Path("/dev/null")
    options = command.Options("http://h", json=path)
    command.write(options)
    command.write(options, {"failed": 0})
    assert path.is_char_device()


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "everything", stopped)
    assert main(["--url", NOBODY]) == command.INTERRUPTED
    assert "interrupted" in capsys.readouterr().err


def test_the_result_is_one_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "a.json"
    name = "an image in a system message"
    monkeypatch.setattr(run, "CHECKS", tuple(c for c in CHECKS if c.name == name))
    with fake_server.serving() as url:
        assert main(["--url", url + "/", "--json", str(out)]) == command.FINE
    found = json.loads(out.read_text())
    assert found["url"] == url and found["passed"] == 1
    assert found["noise"] == {"moved": 0.0, "lost": 0, "repeats": 12}
