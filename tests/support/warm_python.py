"""A Python that has imported what vLLM imports, but no vLLM: it forks itself for each script.

Importing torch, transformers and the rest takes most of the time in which a vLLM is imported, and
is the same for every release. A fork of this process begins where they are there already, and is
otherwise as alone as a new process: its own environment variables, working state and exit.

Standard input: one JSON object a line, {"script", "arguments", "environment", "output", "errors"}.
Standard output: for each of them a line with the fork's process id, then one with its exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import py_compile
import random
import runpy
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import warm_loops
import warm_module

# What the releases import at their start. One that is missing here is imported by the script, or
# its absence is noticed there.
MODULES = (
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.utils.cpp_extension",
    "triton",
    "transformers.modeling_utils",
    "transformers.processing_utils",
    "transformers.tokenization_mistral_common",
    "transformers.video_processing_utils",
    "openai",
    "anthropic",
    "fastapi",
    "uvicorn",
    "aiohttp",
    "requests",
    "cv2",
    "zmq.asyncio",
    "msgspec",
    "jsonschema",
    "partial_json_parser",
    "prometheus_client",
    "einops",
    "xgrammar",
    "hypothesis",
)
#: Scripts that prepare images.
WITH_IMAGES = ("child_overlay.py", "child_chat.py", "child_sequences.py", "child_failures.py")


def main() -> None:
    for name in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else the collector of every fork copies all of these objects' pages
    helper = warm_module.Helper()
    loops: warm_loops.Compiled | None = None
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        if loops is None and Path(request["script"]).name in WITH_IMAGES:
            loops = warm_loops.compiled()
            gc.freeze()
        process = os.fork()
        if process == 0:
            answers.close()
            subprocess.run = helper.instead_of(subprocess.run)
            sys.meta_path[:0] = [] if loops is None else [loops]
            run(**request)
        print(process, file=answers, flush=True)
        status = os.waitpid(process, 0)[1]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # what the script started and did not end
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
    helper.close()


def run(
    script: str, arguments: list[str], environment: dict[str, str], output: str, errors: str
) -> NoReturn:
    """Do in this process what `python script arguments` does in a new one."""
    os.setsid()
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for target, descriptor in ((output, 1), (errors, 2)):
        file = os.open(target, flags, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    warm_module.enter(environment, str(Path(script).parent))
    random.seed()
    sys.argv = [script, *arguments]
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException as error:  # noqa: BLE001  told and counted as Python itself would
        code = exit_code(error)
    if folder := environment.get("VISION_EXP_TEST_BYTECODE"):
        keep_bytecode(folder)
    end(code)


def exit_code(error: BaseException) -> int:
    """What a Python that `error` ends exits with; says on standard error what it would say."""
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def end(code: int) -> NoReturn:
    """End as Python does: threads, exit functions, buffers. Only modules are not taken apart,
    which takes one and a half seconds with those of torch and the like."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by the script
            stream.flush()
    os._exit(code & 0xFF)


def keep_bytecode(folder: str) -> None:
    """Compile what was imported from `folder`, so that the next process need not."""
    for module in list(sys.modules.values()):
        spec: Any = getattr(module, "__spec__", None)
        if spec is None or not spec.cached or not str(spec.origin).startswith(folder + os.sep):
            continue
        if not Path(spec.cached).exists():
            with contextlib.suppress(OSError, py_compile.PyCompileError):
                py_compile.compile(spec.origin, spec.cached)


if __name__ == "__main__":
    main()
