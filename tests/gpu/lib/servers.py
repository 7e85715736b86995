"""Servers of two vLLM beside each other on one GPU, and what is kept of their comparison."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: The same for all: equal shares of the card, room for 32 requests of images.
SERVE = [
    *("--kv-cache-dtype", "fp8", "--block-size", "256", "--max-model-len", "4096"),
    *("--max-num-batched-tokens", "2048", "--max-num-seqs", "48", "--served-model-name", "tiny"),
    *("--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(6 << 30)),
    *("--max-logprobs", "256", "--logprobs-mode", "processed_logprobs"),
    *("--tokenizer-mode", "deepseek_v4", "--enable-auto-tool-choice"),
    *("--tool-call-parser", "deepseek_v4"),
    *("--compilation-config", '{"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 40, 48]}'),
]
KERNELS = {"enable_flashinfer_autotune": False, "enable_cutedsl_warmup": False}
IMAGES = ["--limit-mm-per-prompt", '{"image": 4}']


class Lost(RuntimeError):
    """A server ended or was not up in time; its log says why."""


@dataclass(frozen=True)
class Tree:
    """One side: ``path`` is its PYTHONPATH.

    ``jit_warmup`` is off where it does not end: native 0.32.0 compiles one kernel of the vision
    checkpoint for more than four minutes there, one that no request of ours has needed.
    """

    side: str
    path: str
    cache: str
    jit_warmup: bool = True

    @property
    def env(self) -> dict[str, str]:
        mine = {"PYTHONPATH": self.path, "VLLM_CACHE_ROOT": self.cache}
        return os.environ | mine | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


@dataclass
class Server:
    """``vllm serve`` of one side on one checkpoint. ``began``: monotonic seconds."""

    tree: Tree
    model: str
    port: int
    log: Path
    options: list[str] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    seconds: float = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", self.model]
        kernels = KERNELS | {"enable_jit_warmup": self.tree.jit_warmup}
        command += ["--port", str(self.port), *SERVE, *self.options]
        command += ["--kernel-config", json.dumps(kernels)]
        self.began = time.monotonic()
        with self.log.open("w") as sink:
            self.process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, env=self.tree.env
            )

    def up(self) -> bool:
        """Answers. The first time, its seconds since the start are kept. Raises Lost."""
        if self.seconds:
            return True
        if self.process is None or self.process.poll() is not None:
            raise Lost(f"{self.log.name}: ended; {self.log.read_text(errors='replace')[-1500:]}")
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as reply:
                if reply.status != 200:
                    return False
        except OSError:
            return False
        self.seconds = time.monotonic() - self.began
        return True

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def await_all(servers: list[Server], until: float) -> None:
    """Until all answer. Raises Lost when one ends or ``until`` (monotonic) has passed."""
    while late := [server.log.name for server in servers if not server.up()]:
        if time.monotonic() > until:
            raise Lost(f"not up in time: {', '.join(late)}")
        time.sleep(0.2)


def used_memory() -> int:
    """Bytes in use on the whole card, every process's."""
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


def freed_by_stop(server: Server) -> int:
    """Stops it; bytes of the card that came free: all its processes had."""
    before = used_memory()
    server.stop()
    after, until = before, time.monotonic() + 15
    while time.monotonic() < until:
        time.sleep(1)
        now = used_memory()
        if now == after < before:
            break
        after = now
    return before - after


def overlay_of(log: Path) -> str:
    """The overlay's digest as the server's evidence line tells it, or "none"."""
    found = re.search(r"\[vision-exp\] active .* overlay=(\w+)", log.read_text(errors="replace"))
    return found[1] if found else "none"


class Kept:
    """Values, a line of JSON each, in two places: to go on with, and to leave the machine."""

    def __init__(self, path: Path, copy: Path) -> None:
        self.path, self.copy = path, copy
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            self.rows = [json.loads(line) for line in path.read_text().splitlines()]
            copy.write_text(path.read_text())

    def add(self, row: str, side: str, run: int, value: float | str, **more: object) -> None:
        entry = {"row": row, "side": side, "run": run, "value": value, **more}
        self.rows.append(entry)
        line = json.dumps(entry) + "\n"
        for target in (self.path, self.copy):
            with target.open("a") as sink:
                sink.write(line)
        print(f"[beside] {row} {side} {run}: {value}", flush=True)

    def has(self, row: str, side: str, run: int) -> bool:
        return any((e["row"], e["side"], e["run"]) == (row, side, run) for e in self.rows)
