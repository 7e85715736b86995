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
from dataclasses import dataclass
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
#: The largest movement of the texts is the largest of few; of as many images one may move further.
MARGIN = 2.0
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
    """The same picture again is only told of: a repeat runs behind a warm prefix, whose rounding
    moves near ties; the validator judges repeats by log-probabilities."""
    image = ("What is this?", data_url(*WIDE, seed=5), "Say it.")
    text, count = ask(image)
    again, _ = ask(image)
    other, _ = ask(("What is this?", data_url(*WIDE, seed=6), "Say it."))
    detail = f"{count} prompt tokens, {text!r}; again {again!r}; other picture {other!r}"
    return count > 366 and other not in (text, again), detail


def concurrent() -> tuple[bool, str]:
    """Eight image requests at once, against each alone; eight texts show what company does."""
    from concurrent.futures import ThreadPoolExecutor

    from vision_exp.validate_client import Client

    client = Client(URL, "tiny")
    letters = np.random.default_rng(7).integers(97, 123, size=(8, TEXT_LENGTH), dtype=np.uint8)

    def once(parts: tuple[str, ...]) -> Any:
        return client.ask(message(*parts)[0]["content"], max_tokens=8, salt=uuid.uuid4().hex)

    def both(requests: list[tuple[str, ...]]) -> Company:
        alone = [[once(parts) for _ in range(ALONE)] for parts in requests]
        with ThreadPoolExecutor(8) as pool:
            rounds = [list(pool.map(once, requests)) for _ in range(ROUNDS)]
        return Company(alone, [list(answers) for answers in zip(*rounds, strict=True)])

    images = [("Look.", data_url(*SQUARE, seed=100 + i), "Tell.") for i in range(8)]
    texts = [("Look. " + row.tobytes().decode(),) for row in letters]
    return judge_company(both(images), both(texts))


@dataclass(frozen=True)
class Company:
    """Per request: answers alone, answers in company."""

    alone: list[list[Any]]
    together: list[list[Any]]

    def moved_alone(self) -> list[float]:
        return [first_moved(a, b) for group in self.alone for a in group for b in group]

    def moved_together(self) -> list[float]:
        groups = zip(self.alone, self.together, strict=True)
        return [first_moved(a, b) for mine, others in groups for a in mine for b in others]

    def known(self) -> int:
        """Answers in company that are among those alone, word for word."""
        groups = zip(self.alone, self.together, strict=True)
        return sum(b.text in {a.text for a in mine} for mine, others in groups for b in others)

    def own(self) -> int:
        """Answers in company whose first token is nearer to its own request's than to another's."""
        return sum(
            min(range(len(self.alone)), key=lambda i: nearest(answer, self.alone[i])) == index
            for index, answers in enumerate(self.together)
            for answer in answers
        )


def judge_company(images: Company, texts: Company) -> tuple[bool, str]:
    """Images may move by as much as texts do, or as one request's repeats do.

    Eight run other kernels than one, so answers move without any image, and how many stay word for
    word depends on how near the prompts' answers are to ties. So the first token's
    log-probabilities are judged, and that most answers are nearest to their own picture's. What
    texts or repeats moved beyond measure excuses nothing.
    """
    known = [*texts.moved_together(), *texts.moved_alone(), *images.moved_alone()]
    noise = max(moved for moved in known if moved < math.inf)
    moved, count = max(images.moved_together()), 8 * ROUNDS
    detail = (
        f"first token moved by {moved:.2f} nats, texts in the same company and repeats alone by "
        f"{noise:.2f}; nearest to the same picture alone: {images.own()} of {count} (texts "
        f"{texts.own()}); word for word as alone {images.known()} (texts {texts.known()}); "
        f"{len({group[0].text for group in images.alone})} distinct"
    )
    return moved <= MARGIN * noise and images.own() > count / 2, detail


def nearest(answer: Any, group: list[Any]) -> float:
    return min(first_moved(answer, each) for each in group)


def first_moved(left: Any, right: Any) -> float:
    """Furthest that one of the first token's log-probabilities moved beside another's, in nats.

    Infinite where the two answers' alternatives have less than two tokens in common.
    """
    mine, other = left.tokens[0], right.tokens[0]
    change = [mine[token] - other[token] for token in mine if token in other]
    return max(change) - min(change) if len(change) > 1 else math.inf


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
