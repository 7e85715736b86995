"""Runs scripts in forks of one warm Python (warm_python.py), each with its own environment."""

from __future__ import annotations

import atexit
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

SERVER = Path(__file__).with_name("warm_python.py")
# Read by torch, Triton and others when they are imported: these differ, so do the warm Pythons.
AT_IMPORT = ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TRITON_INTERPRET")


class Python:
    """One warm Python. It ends with this process, or when it no longer answers."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            bufsize=0,
        )

    def fork(self, request: Mapping[str, object], timeout: float) -> int:
        """Exit code of a script in a fork; kills it and raises TimeoutExpired after `timeout` s."""
        assert self.process.stdin is not None
        self.process.stdin.write((json.dumps(request) + "\n").encode())
        fork = self._answer(None)
        try:
            return self._answer(timeout)
        except (TimeoutError, KeyboardInterrupt) as error:
            os.killpg(fork, signal.SIGKILL)
            self._answer(None)
            if isinstance(error, KeyboardInterrupt):
                raise
            raise subprocess.TimeoutExpired(str(request["script"]), timeout) from None

    def _answer(self, timeout: float | None) -> int:
        stream = self.process.stdout
        assert stream is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            if not selector.select(timeout):
                raise TimeoutError
        line = stream.readline()
        if not line:
            self.log.seek(0)
            told = self.log.read().decode(errors="replace")
            raise RuntimeError(f"warm Python ended with {self.process.wait()}\n{told[-4000:]}")
        return int(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@cache
def _python(values: tuple[tuple[str, str], ...]) -> Python:
    left_out = {*AT_IMPORT, "PYTHONPATH"}
    kept = {key: value for key, value in os.environ.items() if key not in left_out}
    python = Python({**kept, **dict(values)})
    atexit.register(python.close)
    return python


def run(
    script: Path, *arguments: str, environment: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Like `subprocess.run` of a script with captured output, but begun where torch is imported.

    PYTHONPATH of `environment` counts. Raises TimeoutExpired.
    """
    values = tuple((key, environment[key]) for key in AT_IMPORT if key in environment)
    with tempfile.TemporaryDirectory(prefix="vision-exp-output-") as name:
        output, errors = Path(name, "output"), Path(name, "errors")
        request = {
            "script": str(script),
            "arguments": arguments,
            "environment": dict(environment),
            "output": str(output),
            "errors": str(errors),
        }
        code = _python(values).fork(request, timeout)
        told = [path.read_text(errors="replace") for path in (output, errors)]
    return subprocess.CompletedProcess([str(script), *arguments], code, *told)
