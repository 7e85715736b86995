"""`python -m MODULE` for the scripts of a warm Python, begun where torch is imported too.

vLLM asks a process of its own what a model's class can do, which takes as long to start as all
else that a script does. A helper, forked from the warm Python before any script, forks itself for
each such process: it has imported no vLLM, like a new one, and gets the caller's environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODULES = ("vllm.model_executor.models.registry",)


class Helper:
    """A process that runs modules in forks of itself until all who could ask are gone."""

    def __init__(self) -> None:
        # Not a TemporaryDirectory: every fork that ends would remove it.
        self.folder = tempfile.mkdtemp(prefix="vision-exp-helper-")
        self.address = str(Path(self.folder, "socket"))
        ended, self._held = os.pipe()  # its end is seen where nobody holds it any more
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen()
            if os.fork() == 0:
                os.close(self._held)
                self._serve(listener, ended)
                os._exit(0)
        os.close(ended)

    def close(self) -> None:
        os.close(self._held)
        shutil.rmtree(self.folder)

    def _serve(self, listener: socket.socket, ended: int) -> None:
        os.setsid()
        while ended not in select.select([listener, ended], [], [])[0]:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):  # the asking script was killed
                text, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
                process = os.fork()
                if process == 0:
                    _run_module(json.loads(text), files)
                for file in files:
                    os.close(file)
                status = os.waitpid(process, 0)[1]
                connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())

    def instead_of(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A `subprocess.run` that asks the helper for `python -m` with one of MODULES."""

        def run(*arguments: Any, **options: Any) -> Any:
            for module in MODULES:
                if arguments == ([sys.executable, "-m", module],):
                    return self._ask(module, **options)
            return original(*arguments, **options)

        return run

    def _ask(
        self, module: str, *, input: bytes, capture_output: bool
    ) -> subprocess.CompletedProcess[bytes]:
        assert capture_output
        with (
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as output,
            tempfile.TemporaryFile() as errors,
            socket.socket(socket.AF_UNIX) as connection,
        ):
            given.write(input)
            given.seek(0)
            connection.connect(self.address)
            request = {"module": module, "folder": str(Path.cwd()), "environment": dict(os.environ)}
            files = [file.fileno() for file in (given, output, errors)]
            socket.send_fds(connection, [json.dumps(request).encode()], files)
            code = int(connection.recv(64))
            for file in (output, errors):
                file.seek(0)
            command = [sys.executable, "-m", module]
            return subprocess.CompletedProcess(command, code, output.read(), errors.read())


def _run_module(request: dict[str, Any], files: list[int]) -> None:
    """Do in this process what `python -m MODULE` does in a new one, and end it."""
    for target, file in enumerate(files):
        os.dup2(file, target)
    os.chdir(request["folder"])
    enter(request["environment"], request["folder"])
    sys.argv = [request["module"]]
    code = 0
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # noqa: BLE001  told on standard error, as Python itself would
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def enter(environment: dict[str, str], folder: str) -> None:
    """Take over the environment variables and the search path that a new process would have."""
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [folder, *environment["PYTHONPATH"].split(os.pathsep), *sys.path[1:]]
