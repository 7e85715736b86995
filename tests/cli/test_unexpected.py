"""A fault of our own: said as such, with its traceback, and with what holds for the tree."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import hotfix_rig
import pytest
from hotfix_rig import REPO, Rig

import hotfix


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """A vLLM of one file, and a command line that fails on it."""
    rig = Rig(tmp_path)
    rig.root.mkdir(parents=True)
    (rig.root / "__init__.py").write_text("")

    def fails(*_: object) -> None:
        raise KeyError("two\nlines")

    monkeypatch.setattr(hotfix, "_from_receipt", fails)
    return rig


@pytest.mark.parametrize("verb", ["apply", "status"])
@pytest.mark.parametrize("quiet", [[], ["-q"], ["-v"]], ids=["plain", "quiet", "verbose"])
def test_first_line_consequence_next_command_and_traceback(
    rig: Rig, verb: str, quiet: list[str]
) -> None:
    answer = rig.run(*quiet, verb)
    assert answer.code == 6
    assert answer.out == ""
    assert "unexpected error inside vision-exp: KeyError: 'two" in answer.cause
    assert answer.cause.endswith("Nothing was changed.")
    assert answer.err.count("Traceback (most recent call last)") == 1
    assert "test_unexpected.py" in answer.err, "the traceback does not lead to the fault"
    assert "next: report all of this" in answer.err


def test_json(rig: Rig) -> None:
    answer = rig.run("--json", "apply")
    assert (answer.code, answer.err) == (6, "")
    assert answer.json["exit"] == 6
    assert answer.json["error"]["reference"] == "unexpected-error"
    assert "Traceback" in answer.json["error"]["context"][0]
    assert answer.json.keys() >= {"schema", "tool", "state", "vllm", "plan", "files", "overlay"}


def test_with_an_interrupted_run_in_the_tree(rig: Rig) -> None:
    (rig.root / ".vision-exp").mkdir()
    (rig.root / ".vision-exp" / "journal.json").write_text("{}")
    answer = rig.run("status")
    assert answer.code == 5
    assert "the next apply or revert rolls it back first" in answer.cause
    assert "nothing was changed" not in answer.err.lower()


def test_before_a_vllm_was_found(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hotfix, "discover", hotfix._from_receipt)
    answer = rig.run("apply")
    assert answer.code == 6
    assert answer.cause.endswith("Nothing was changed.")


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_names_that_the_terminal_cannot_show(tmp_path: Path, encoding: str) -> None:
    root = tmp_path / "k\xf6ln-\udcff" / "vllm"
    root.mkdir(parents=True)
    (root / "__init__.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-B", REPO / "hotfix.py", "--root", root, "status"],
        env={"PATH": "/usr/bin", "HOME": str(tmp_path), "PYTHONIOENCODING": encoding},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    assert b"Traceback" not in done.stderr
    assert b"not-applicable" in done.stdout
    assert hotfix_rig.contents(root).keys() == {"__init__.py"}


@pytest.mark.parametrize(
    ("redirection", "words"), [(">&-", b""), (">&- 2>&-", b""), (">/dev/full", b"cannot print")]
)
def test_an_output_that_takes_nothing(tmp_path: Path, redirection: str, words: bytes) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    line = f'"$0" -B "$1" --root "$2" status {redirection}'
    done = subprocess.run(
        ["sh", "-c", line, sys.executable, REPO / "hotfix.py", tmp_path / "vllm"],
        env={"PATH": "/usr/bin", "HOME": str(tmp_path)},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    assert b"Traceback" not in done.stderr
    assert words in done.stderr


@pytest.mark.parametrize(
    ("module", "rest"),
    [
        ("argparse", ""),  # while the tool itself is imported
        ("libcst", ""),
        ("libcst", "except BaseException: raise ImportError('half of it is there')"),
        ("libcst", "except BaseException: raise SystemError('initialization failed')"),
    ],
)
def test_an_interrupt_during_an_import(tmp_path: Path, module: str, rest: str) -> None:
    """Exit 130, whatever the module that was being imported makes of it."""
    wait = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)"
    (tmp_path / "path").mkdir()
    text = f"try:\n  {wait}\n{rest or 'finally: pass'}\n"
    (tmp_path / "path" / f"{module}.py").write_text(text)
    rig = hotfix_rig.make(tmp_path / "rig", "0.29.0")
    answer = rig.spawn(
        "apply",
        env={"PYTHONPATH": str(tmp_path / "path")},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert answer.code == 130, answer.err
    assert answer.cause.startswith("[vision-exp] interrupted before anything was")
    assert "Traceback" not in answer.err


def test_errors_that_caused_each_other_are_no_interrupt() -> None:
    one, two = OSError("one"), OSError("two")
    one.__cause__, two.__cause__ = two, one
    assert not hotfix._was_interrupted(one)
    two.__cause__ = KeyboardInterrupt()
    assert hotfix._was_interrupted(one)
