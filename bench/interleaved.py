"""Interleaved runs of long-lived processes: none is measured while another one works.

A ratio of two processes that ran one after the other also has the machine's drift in it; decode
steps of the same tree differed by 1.4 times that way. The parent asks one process after the other
for a run; a process works only while it is asked. Neighbours on the machine only ever add time,
and half of all runs had some: so the fastest tenth of a process's times counts. Every tree gets
several processes: what those of one tree differ by is the noise.
"""

from __future__ import annotations

import gc
import json
import math
import os
import select
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

#: A first run compiles kernels.
RUN_SECONDS = 120


class WorkerLost(RuntimeError):
    """A process ended or did not answer in time."""


@dataclass(frozen=True)
class Worker:
    """A process that answers one command a line, as JSON, on a pipe of its own."""

    label: str
    process: subprocess.Popen[str]
    replies: IO[str]

    def read(self, seconds: float) -> Any:
        """The next answer. Raises WorkerLost."""
        if not select.select([self.replies], [], [], max(seconds, 0))[0]:
            raise WorkerLost(f"{self.label}: no answer within {seconds:.0f} s")
        line = self.replies.readline()
        if not line:
            raise WorkerLost(f"{self.label}: ended")
        return json.loads(line)

    def run(self, command: str, seconds: float = RUN_SECONDS) -> Any:
        """Asks for one run and waits for its result. Raises WorkerLost."""
        if self.process.stdin is None:
            raise WorkerLost(f"{self.label}: has no input")
        try:
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkerLost(f"{self.label}: ended") from error
        return self.read(seconds)

    def stop(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.replies.close()


def start(label: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> Worker:
    """Starts ``command FD``, which calls `serve`; its output goes to ``log``."""
    reading, writing = os.pipe()
    with log.open("w") as sink:
        process = subprocess.Popen(
            [*command, str(writing)],
            stdin=subprocess.PIPE,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=dict(env),
            pass_fds=(writing,),
            text=True,
        )
    os.close(writing)
    return Worker(label, process, os.fdopen(reading))


def serve(runs: Mapping[str, Callable[[], Any]], replies: int) -> int:
    """In a worker: says that it is ready, then answers commands until its input ends."""
    # One set of cores for all processes: which core a process got decides a host-bound step. Not a
    # single core: threads that start later stay on it too, and a prefill took twice as long.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:4])
    with os.fdopen(replies, "w") as sink:
        answer(sink, "ready")
        for line in sys.stdin:
            gc.collect()
            gc.disable()
            try:
                result = runs[line.strip()]()
            finally:
                gc.enable()
            answer(sink, result)
    return 0


def answer(sink: IO[str], result: Any) -> None:
    sink.write(json.dumps(result) + "\n")
    sink.flush()


Times = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Comparison:
    """Patched over stock: ``ratio``, and ``noise``, two standard errors of it.

    ``fast`` holds every process's fastest tenth: what processes of one tree differ by there is
    where the error comes from.
    """

    ratio: float
    noise: float
    fast: dict[str, float]

    def within(self, limit: float) -> bool | None:
        """None: the processes of one tree differ too much to tell."""
        if self.ratio + self.noise <= limit:
            return True
        if self.ratio - self.noise > limit:
            return False
        return self.ratio <= limit if self.noise <= limit - 1 else None

    def words(self) -> str:
        fast = ", ".join(f"{name} {value:.3f}" for name, value in self.fast.items())
        return f"ratio {self.ratio:.4f} +- {self.noise:.4f} (fastest tenth, ms: {fast})"


def fastest_tenth(times: Sequence[float]) -> float:
    """The time that a tenth of them does not exceed."""
    return statistics.quantiles(times, n=10, method="inclusive")[0]


def compare(stock: Times, patched: Times) -> Comparison:
    """Times of every process, by label; two processes a tree at least."""
    if min(len(stock), len(patched)) < 2:
        raise ValueError(f"{len(stock)} and {len(patched)} processes")
    fast = {name: fastest_tenth(times) for name, times in {**stock, **patched}.items()}
    before, after = ([math.log(fast[name]) for name in tree] for tree in (stock, patched))
    error = math.sqrt(sum(statistics.variance(tree) / len(tree) for tree in (before, after)))
    ratio = math.exp(statistics.fmean(after) - statistics.fmean(before))
    return Comparison(ratio, 2 * error, fast)
