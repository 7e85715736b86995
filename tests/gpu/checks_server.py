"""`vllm serve` as a user runs it: the official client sends pictures, the validator judges.

checks_server.py stock MODEL REPORT.json LOG      (stock tree: must fail as users reported)
checks_server.py patched MODEL REPORT.json LOG
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import re
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from gpu.rig import SQUARE, WIDE, Report, picture

PORT = int(os.environ.get("CHECKS_PORT", "8123"))
URL = f"http://127.0.0.1:{PORT}/v1"
ROOT = Path(__file__).resolve().parents[2]
#: Times that a request is asked alone, to learn how far its answers vary by themselves.
ALONE = 3
#: Times that eight are asked at once; letters of a text as long as a square picture's block.
ROUNDS, TEXT_LENGTH = 3, 114
#: Images that part from lone answers so much more often than texts are held to part by themselves.
LEAST_CHANCE = 0.01
SERVE = [
    *("--kv-cache-dtype", "fp8", "--block-size", "256", "--max-model-len", "4096"),
    *("--max-num-batched-tokens", "2048", "--max-num-seqs", "16"),
    *("--gpu-memory-utilization", "0.12", "--kv-cache-memory-bytes", str(4 << 30)),
    *("--limit-mm-per-prompt", '{"image": 8}', "--served-model-name", "tiny"),
    *("--compilation-config", '{"cudagraph_capture_sizes": [1, 2, 4, 8]}'),
    "--kernel-config",
    '{"enable_flashinfer_autotune": false, "enable_cutedsl_warmup": false}',
]
#: What the reports of users show on a stock tree, in the order in which loading meets them.
STOCK_FAILURES = (
    r"no module or parameter named '(aligner|vision)",
    r"KeyError: '[^']*(aligner|bias_vl|e_score_correction_bias)",
)


@contextmanager
def server(model: str, log: Path, *options: str, ready: float = 420) -> Iterator[subprocess.Popen]:
    """A running server, or one that ended by itself; waits until it answers or dies."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    command += ["--port", str(PORT), *SERVE, *options]
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=env)
        try:
            limit = time.monotonic() + ready
            while time.monotonic() < limit and process.poll() is None and not healthy():
                time.sleep(1)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()


def healthy() -> bool:
    try:
        with urllib.request.urlopen(URL.removesuffix("/v1") + "/health", timeout=2) as reply:
            return reply.status == 200
    except OSError:
        return False


def stock(model: str, report_path: str, log_path: str) -> int:
    report = Report(Path(report_path))

    def check() -> tuple[bool, str]:
        log = Path(log_path)
        with server(model, log) as process:
            code = process.poll()
        words = log.read_text(errors="replace")
        found = [m for p in STOCK_FAILURES if (m := re.search(p, words))]
        if code is None:
            return False, "the stock server started"
        return bool(found), f"exit {code}: {found[0][0] if found else words[-300:]}"

    report.run("stock vLLM fails on the checkpoint as reported", check)
    return 0


def patched(model: str, report_path: str, log_path: str) -> int:
    report = Report(Path(report_path))
    log = Path(log_path)
    started = time.monotonic()
    with server(model, log) as process:
        up = process.poll() is None and healthy()
        report.add("patched vLLM serves", up, f"{time.monotonic() - started:.0f} s to start")
        if not up:
            print(log.read_text(errors="replace")[-3000:])
            return 1
        report.run("evidence in the log", lambda: evidence(log))
        report.run("openai client: image request", client)
        report.run("openai client: eight at once", concurrent)
        report.run("vision_exp.validate", lambda: validate(Path(report_path)))
    return 0


def evidence(log: Path) -> tuple[bool, str]:
    lines = re.findall(r"\[vision-exp\] active .*", log.read_text(errors="replace"))
    good = any("routing=bias_vl" in line and "visibility=bidirectional" in line for line in lines)
    return good, " | ".join(lines)[:500] or "no line"


def data_url(width: int, height: int, seed: int) -> str:
    sink = io.BytesIO()
    picture(width, height, seed).save(sink, format="PNG")
    return "data:image/png;base64," + base64.b64encode(sink.getvalue()).decode()


def message(*parts: str) -> list[dict]:
    """A user message: parts that start with data: are pictures, the others text."""
    content = [
        {"type": "image_url", "image_url": {"url": part}}
        if part.startswith("data:")
        else {"type": "text", "text": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def ask(parts: tuple[str, ...]) -> tuple[str, int]:
    from openai import OpenAI

    client = OpenAI(base_url=URL, api_key="none", timeout=120)
    answer = client.chat.completions.create(
        model="tiny", messages=message(*parts), max_tokens=8, temperature=0
    )
    return answer.choices[0].message.content or "", answer.usage.prompt_tokens


def client() -> tuple[bool, str]:
    image = ("What is this?", data_url(*WIDE, seed=5), "Say it.")
    text, count = ask(image)
    again, _ = ask(image)
    other, _ = ask(("What is this?", data_url(*WIDE, seed=6), "Say it."))
    detail = f"{count} prompt tokens, {text!r}; again {again!r}; other picture {other!r}"
    return count > 366 and text == again and text != other, detail


def concurrent() -> tuple[bool, str]:
    """Eight image requests at once, against each alone; eight texts show what company does.

    A batch of eight runs other kernels than one request does, so answers move without any image.
    """
    from concurrent.futures import ThreadPoolExecutor

    from vision_exp.validate_client import Client
    from vision_exp.validate_judge import movement

    client = Client(URL, "tiny")
    letters = np.random.default_rng(7).integers(97, 123, size=(8, TEXT_LENGTH), dtype=np.uint8)

    def once(parts: tuple[str, ...]) -> Any:
        return client.ask(message(*parts)[0]["content"], max_tokens=8, salt=uuid.uuid4().hex)

    def both(requests: list[tuple[str, ...]]) -> tuple[list[list[Any]], list[list[Any]]]:
        """Per request: answers alone, answers in company."""
        alone = [[once(parts) for _ in range(ALONE)] for parts in requests]
        with ThreadPoolExecutor(8) as pool:
            rounds = [list(pool.map(once, requests)) for _ in range(ROUNDS)]
        return alone, [list(answers) for answers in zip(*rounds, strict=True)]

    images = [("Look.", data_url(*SQUARE, seed=100 + i), "Tell.") for i in range(8)]
    alone, together = both(images)
    text_alone, text_together = both([("Look. " + row.tobytes().decode(),) for row in letters])
    pairs = [
        pair
        for groups in ((alone, together), (text_alone, text_together))
        for pair in zip(*groups, strict=True)
    ]
    noise = max(
        moved
        for group, answers in pairs
        for a in group
        for b in [*group, *answers]
        if (moved := movement(a, b)) < math.inf
    )
    known, text_known = (
        sum(
            answer.text in {each.text for each in group}
            for group, answers in zip(*groups, strict=True)
            for answer in answers
        )
        for groups in ((alone, together), (text_alone, text_together))
    )
    count = 8 * ROUNDS
    chance = no_more_by_chance(known, text_known, count)
    detail = (
        f"{known} of {count} image answers among those of {ALONE} repeats alone, of as many texts "
        f"in the same company {text_known}: so few or fewer by chance {chance:.3f}; answers move "
        f"by up to {noise:.2f} nats; {len({group[0].text for group in alone})} distinct"
    )
    return chance >= LEAST_CHANCE and known > 0, detail


def no_more_by_chance(images: int, texts: int, count: int) -> float:
    """Chance of ``images`` or fewer among the images if images and texts part alike.

    Of ``2 * count`` answers ``images + texts`` are known; Fisher's exact test, one-sided.
    """
    known = images + texts
    ways = math.comb(2 * count, known)
    least = max(0, known - count)
    return (
        sum(math.comb(count, k) * math.comb(count, known - k) for k in range(least, images + 1))
        / ways
    )


def validate(report_path: Path) -> tuple[bool, str]:
    out = report_path.with_name("validate.json")
    command = [sys.executable, "-m", "vision_exp.validate", "--url", URL, "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    print(done.stdout[-6000:], done.stderr[-2000:], flush=True)
    result = json.loads(out.read_text())
    states = [check["state"] for check in result["checks"]]
    counts = {state: states.count(state) for state in sorted(set(states))}
    return done.returncode == 0, f"exit {done.returncode}, {counts}"


if __name__ == "__main__":
    sys.exit({"stock": stock, "patched": patched}[sys.argv[1]](*sys.argv[2:]))
