"""Servers over two GPUs: three minutes of image requests, and ranks of different code.

checks_two_serve.py soak MODEL REPORT.json LOG READY     eight clients; READY is written once up
checks_two_serve.py differ MODEL REPORT.json LOGS OTHER_TREE OTHER_OVERLAY
    two nodes of one model, the second from a tree with another overlay: must stop
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu.jobs.checks_server import SERVE, URL, data_url, healthy, message, server
from gpu.lib.rig import SQUARE, WIDE, Report

# From this folder: the validator is no part of the overlay.
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from vision_exp.validate.client import Client

SOAK_SECONDS, CLIENTS = 180, 8
#: Images of each size: more than the encoder cache holds, so that the tower works on.
PICTURES = 8
#: Alone on the machine a server over two GPUs took 80 s to start, beside a dozen engines 160 s.
READY_SECONDS = 240
STOP_SECONDS, END_SECONDS = 150, 20
#: Words of a server's log that no image request may cause.
TROUBLE = r"Traceback \(most recent call last\)|\bERROR\b"


def soak(model: str, report_path: str, log: str, ready: str) -> int:
    report = Report(Path(report_path))
    path = Path(log)
    started = time.monotonic()
    options = ("--tensor-parallel-size", "2")
    with server(model, path, *options, ready=READY_SECONDS) as process:
        up = process.poll() is None and healthy()
        took = f"{time.monotonic() - started:.0f} s to start"
        words = took if up else took + "; " + path.read_text(errors="replace")[-600:]
        report.add("two GPUs: serves", up, words)
        Path(ready).write_text(words)
        if not up:
            return 1
        name = f"{CLIENTS} clients for {SOAK_SECONDS} s"
        report.run(f"two GPUs: {name}", lambda: clients(SOAK_SECONDS))
        report.run("two GPUs: afterwards", lambda: afterwards(path))
    return 0


def clients(seconds: float) -> tuple[bool, str]:
    """Clients that ask on without a pause, always with images; answers are not assessed here.

    The first error of a client ends that client and fails the check.
    """
    squares = [data_url(*SQUARE, seed=100 + index) for index in range(PICTURES)]
    wides = [data_url(*WIDE, seed=200 + index) for index in range(PICTURES)]
    until = time.monotonic() + seconds

    def one(index: int) -> tuple[int, int, str]:
        """Requests answered, images in them, and the error that ended it."""
        random = np.random.default_rng(index)
        client, count, images = Client(URL, "tiny"), 0, 0
        while time.monotonic() < until:
            square, wide = squares[random.integers(PICTURES)], wides[random.integers(PICTURES)]
            kinds = [("See", square, "say."), (wide, "What?"), (square, wide, "Both?")]
            parts = kinds[random.integers(len(kinds))]
            shown = sum(part.startswith("data:") for part in parts)
            try:
                salt = uuid.uuid4().hex
                asked = client.ask(message(*parts)[0]["content"], max_tokens=8, cache_salt=salt)
                answer = asyncio.run(asked)
            except Exception as error:  # noqa: BLE001 - reported, with what was answered before
                return count, images, f"client {index}: {type(error).__name__}: {error}"[:300]
            if answer.prompt_tokens < 100 * shown:
                return count, images, f"client {index}: {answer.prompt_tokens} prompt tokens"
            count, images = count + 1, images + shown
        return count, images, ""

    with ThreadPoolExecutor(CLIENTS) as pool:
        found = list(pool.map(one, range(CLIENTS)))
    errors = [words for _, _, words in found if words]
    counts = [count for count, _, _ in found]
    detail = (
        f"{sum(counts)} answers, {sum(p for _, p, _ in found)} images, at least {min(counts)} "
        f"answers each, {len(errors)} clients with an error"
    )
    return not errors and min(counts) > 0, "; ".join([detail, *errors])


def afterwards(log: Path) -> tuple[bool, str]:
    answer = asyncio.run(Client(URL, "tiny").ask(message("Hello.")[0]["content"], max_tokens=8))
    words = log.read_text(errors="replace")
    lines = [line for line in words.splitlines() if re.search(TROUBLE, line)]
    detail = f"healthy: {healthy()}, a text answer of {len(answer.tokens)} tokens"
    detail += f", {len(lines)} errors in the log" + "".join(f"; {line[:200]}" for line in lines[:2])
    return healthy() and not lines, detail


def differ(model: str, report_path: str, logs: str, tree: str, overlay: str) -> int:
    report = Report(Path(report_path))
    report.run(
        "a rank with another overlay stops the start",
        lambda: two_nodes(model, Path(logs), tree, overlay),
    )
    return 0


def two_nodes(model: str, logs: Path, tree: str, overlay: str) -> tuple[bool, str]:
    """The two ranks as two nodes on this host, each from its own tree."""
    path = os.environ["PYTHONPATH"].split(":")
    other = ":".join([tree, *path[1:-1], overlay])
    paths = [logs / f"two-differ-{rank}.log" for rank in (0, 1)]
    began = time.monotonic()
    running = []
    for rank, python_path in enumerate((os.environ["PYTHONPATH"], other)):
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, *SERVE]
        command += ["--port", "8140", "--tensor-parallel-size", "2", "--nnodes", "2"]
        command += ["--node-rank", str(rank), "--master-addr", "127.0.0.1"]
        command += ["--master-port", "29666", *["--headless"][:rank]]
        env = os.environ | {"PYTHONPATH": python_path, "CUDA_VISIBLE_DEVICES": str(rank)}
        env["VLLM_CACHE_ROOT"] = f"{os.environ['VLLM_CACHE_ROOT']}-node{rank}"
        with paths[rank].open("w") as sink:
            process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )
        running.append(process)
    texts = ["", ""]
    try:
        while time.monotonic() - began < STOP_SECONDS:
            texts = [each.read_text(errors="replace") for each in paths]
            if all("run different code" in text for text in texts):
                break
            time.sleep(0.5)
        took = time.monotonic() - began
        ended = exits(running)
        texts = [each.read_text(errors="replace") for each in paths]
    finally:
        for process in running:
            try:
                os.killpg(process.pid, 9)
            except ProcessLookupError:
                print("a node had ended already", flush=True)
    return refusal(texts, took, ended)


def exits(running: list[subprocess.Popen[bytes]]) -> list[int | None]:
    """Exit codes, None for what still runs after a while."""
    until = time.monotonic() + END_SECONDS
    while time.monotonic() < until and any(process.poll() is None for process in running):
        time.sleep(0.5)
    return [process.poll() for process in running]


def refusal(texts: list[str], took: float, ended: list[int | None]) -> tuple[bool, str]:
    """What both nodes' logs say; seconds count from the launch, and from when both had joined."""
    named = ["run different code" in text for text in texts]
    loaded = any("Loading weights took" in text for text in texts)
    digests = set(re.findall(r"overlay (\w{16,})", "".join(texts)))
    joined = [clock(text, "world_size=2 rank=") for text in texts]
    refused = [clock(text, "run different code") for text in texts]
    later = "unknown"
    if None not in joined and None not in refused:
        later = f"{max(filter(None, refused)) - max(filter(None, joined))} s"
    detail = (
        f"refused by nodes {named} {took:.0f} s after the launch, {later} after both had joined; "
        f"exit codes {ended}; weights loaded: {loaded}; {len(digests)} digests named"
    )
    good = all(named) and not loaded and len(digests) == 2 and None not in ended
    return good, detail


def clock(text: str, words: str) -> int | None:
    """Seconds of the day of the first log line with ``words``."""
    found = re.search(rf" \d\d-\d\d (\d\d):(\d\d):(\d\d) .*{re.escape(words)}", text)
    if found is None:
        return None
    hours, minutes, seconds = map(int, found.groups())
    return (hours * 60 + minutes) * 60 + seconds


if __name__ == "__main__":
    verbs = {"soak": soak, "differ": differ}
    sys.exit(verbs[sys.argv[1]](*sys.argv[2:]))
