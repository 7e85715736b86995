"""The validator as a process: how it ends when it is interrupted, or cannot print."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vision_exp.validate import command

sys.path.insert(0, str(Path(__file__).parent))

import fake_model
import fake_server

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "vision_exp.validate", "--url"]
#: More than a machine that is busy takes to end a process; much less than a request has.
AT_ONCE = 10.0


@pytest.mark.parametrize("times", [1, 3])
def test_an_interrupt_ends_it_at_once(times: int, tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    out.write_text('{"failed": 0}')
    fake_model.HANGING.clear()
    with fake_server.serving("hangs when co-batched") as url:
        process = subprocess.Popen(
            [*COMMAND, url, "--json", str(out)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # What a shell starts with `&`, these tests too, ignores interrupts and hands that on.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("model stand-in")
            assert fake_model.HANGING.wait(60)
            started = time.monotonic()
            for _ in range(times):
                process.send_signal(signal.SIGINT)
                time.sleep(0.3)
            told, errors = process.communicate(timeout=AT_ONCE)
        finally:
            process.kill()
    assert time.monotonic() - started < AT_ONCE
    assert process.returncode == command.INTERRUPTED
    assert "Traceback" not in errors and "ignored" not in errors
    # On a busy machine the first check's requests may not meet, and a later check's do.
    found = re.fullmatch(
        r"(\d+) passed, 0 failed, 0 skipped; interrupted: of (\d+) checks nothing is known",
        told.splitlines()[-1],
    )
    assert found
    assert int(found[1]) + int(found[2]) == 15
    # On a busy machine the run may have said that it still runs.
    first, last = [line for line in errors.splitlines() if not line.endswith(" s so far")]
    assert first.startswith("[vision-exp] interrupted")
    typed = shlex.split(last.removeprefix(f"next: {command.COMMAND} "))
    assert command.parse(typed).url == url
    assert not out.exists()


def _ends(redirection: str, url: str) -> tuple[int, str]:
    line = f"{shlex.join([*COMMAND, url])} {redirection}"
    done = subprocess.run(
        ["/bin/sh", "-c", line], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr and "ignored" not in done.stderr
    return done.returncode, done.stderr


def test_what_cannot_be_printed_is_no_result() -> None:
    with fake_server.serving() as url:
        code, words = _ends(">/dev/full", url)
        assert code == command.NOT_WRITTEN
        assert "No space left on device" in words and f"--url {url} >FILE" in words
        code, words = _ends(">&-", url)
        assert code == command.NOT_WRITTEN
        assert "standard output is closed" in words and f"--url {url} >FILE" in words


@pytest.mark.parametrize(
    ("module", "package"), [("httpx", "httpx"), ("PIL", "pillow"), ("pydantic", "pydantic")]
)
def test_a_package_that_is_missing_is_named(module: str, package: str, tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    words = [f"import runpy, sys; sys.modules[{module!r}] = None; sys.argv[1:] = sys.argv[2:]"]
    words += ["runpy.run_module('vision_exp.validate', run_name='__main__')"]
    argv = [sys.executable, "-c", "; ".join(words), "-", "--url", "http://127.0.0.1:9/v1"]
    done = subprocess.run(
        [*argv, "--json", str(out)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == command.ENVIRONMENT
    first, last = done.stderr.splitlines()
    assert f"the package {package} is missing. Nothing was checked." in first
    assert last.startswith(f"next: python3 -m pip install {package} ")
    assert not out.exists()
