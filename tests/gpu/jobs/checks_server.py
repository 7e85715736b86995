"""`vllm serve` as a user runs it: the official client sends images, the validator assesses.

checks_server.py stock MODEL REPORT.json LOG      (stock tree: must fail as users reported)
checks_server.py patched MODEL REPORT.json LOG
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from gpu.lib.answers import PROBED, nearest, spread
from gpu.lib.cobatched import Cobatched, assess_cobatched
from gpu.lib.rig import SQUARE, WIDE, Report, random_image
from PIL import Image

PORT = int(os.environ.get("CHECKS_PORT", "8123"))
URL = f"http://127.0.0.1:{PORT}/v1"
ROOT = Path(__file__).resolve().parents[3]
#: Times that a request is asked alone, to learn how far its answers vary by themselves.
ALONE = 4
#: Times that eight are asked at once; letters of a text. One as long as a square image's block,
#: 114 tokens, repeats itself bit for bit, which says nothing.
ROUNDS, TEXT_LENGTH = 3, 300
SERVE = [
    *("--kv-cache-dtype", "fp8", "--block-size", "256", "--max-model-len", "4096"),
    *("--max-num-batched-tokens", "2048", "--max-num-seqs", "16"),
    *("--gpu-memory-utilization", "0.12", "--kv-cache-memory-bytes", str(4 << 30)),
    # Log-probabilities of the tokens that a request allows, as many as the checks ask for.
    *("--max-logprobs", str(len(PROBED)), "--logprobs-mode", "processed_logprobs"),
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
    return encoded(random_image(width, height, seed))


def encoded(image: Image.Image) -> str:
    sink = io.BytesIO()
    image.save(sink, format="PNG")
    return "data:image/png;base64," + base64.b64encode(sink.getvalue()).decode()


def message(*parts: str) -> list[dict]:
    """A user message: parts that start with data: are images, the others text."""
    content = [
        {"type": "image_url", "image_url": {"url": part}}
        if part.startswith("data:")
        else {"type": "text", "text": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def ask(parts: tuple[str, ...]) -> tuple[str, int]:
    """The official client's greedy answer of eight tokens, and the length of the prompt."""
    from openai import OpenAI

    client = OpenAI(base_url=URL, api_key="none", timeout=120)
    messages: Any = message(*parts)
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=8, temperature=0
    )
    if answer.usage is None:
        raise ValueError("the answer does not tell how long its prompt was")
    return answer.choices[0].message.content or "", answer.usage.prompt_tokens


def first(parts: tuple[str, ...]) -> dict[int, float]:
    """The first token's log-probabilities of all PROBED ids, prefix cache unused."""
    from openai import OpenAI

    client = OpenAI(base_url=URL, api_key="none", timeout=120)
    messages: Any = message(*parts)
    answer = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=1,
        temperature=0,
        logprobs=True,
        top_logprobs=len(PROBED),
        extra_body={
            "allowed_token_ids": list(PROBED),
            "return_tokens_as_token_ids": True,
            "cache_salt": uuid.uuid4().hex,
        },
    )
    listed = answer.choices[0].logprobs
    if listed is None or not listed.content:
        raise ValueError("the answer lists no log-probabilities")
    return by_id((entry.token, entry.logprob) for entry in listed.content[0].top_logprobs)


def by_id(entries: Iterable[tuple[str, float]]) -> dict[int, float]:
    """Log-probabilities by id, of tokens that are told as "token_id:7"; ValueError if one lacks."""
    row = {int(token.removeprefix("token_id:")): value for token, value in entries}
    if row.keys() != set(PROBED):
        raise ValueError(f"{len(row)} alternatives, not the {len(PROBED)} that were asked for")
    return row


def client() -> tuple[bool, str]:
    """An answer with an image, and another image further away than the same one again."""
    parts, other = (("What is this?", data_url(*WIDE, seed=seed), "Say it.") for seed in (5, 6))
    text, count = ask(parts)
    same, distances = assess_client(
        [first(parts) for _ in range(ALONE)], [first(other), first(other)]
    )
    return count > 366 and same, f"{count} prompt tokens, {text!r}; {distances}"


def assess_client(
    same: Sequence[dict[int, float]], other: Sequence[dict[int, float]]
) -> tuple[bool, str]:
    """Another image's answers are further from all of one's than those are from each other."""
    repeats, away = spread(same), min(nearest(row, same) for row in other)
    detail = f"first token {repeats:.3f} from itself again, another image's {away:.3f} from it"
    return away > repeats, detail


def concurrent() -> tuple[bool, str]:
    """Eight image requests at once, against each alone; eight texts show what co-batching does."""
    from concurrent.futures import ThreadPoolExecutor

    letters = np.random.default_rng(7).integers(97, 123, size=(8, TEXT_LENGTH), dtype=np.uint8)

    def both(requests: list[tuple[str, ...]]) -> Cobatched:
        alone = [[first(parts) for _ in range(ALONE)] for parts in requests]
        with ThreadPoolExecutor(8) as pool:
            rounds = [list(pool.map(first, requests)) for _ in range(ROUNDS)]
        return Cobatched(alone, [list(answers) for answers in zip(*rounds, strict=True)])

    images: list[tuple[str, ...]] = [("Look.", coloured(i), "Tell.") for i in range(8)]
    texts: list[tuple[str, ...]] = [("Look. " + row.tobytes().decode(),) for row in letters]
    return assess_cobatched(both(images), both(texts))


def coloured(index: int) -> str:
    """One of eight images, each mostly of a colour of its own."""
    size = SQUARE
    colour = tuple(255 * (index >> bit & 1) for bit in range(3))
    plain = Image.new("RGB", size, colour)
    return encoded(Image.blend(random_image(*size, seed=100 + index), plain, 0.6))


def validate(report_path: Path) -> tuple[bool, str]:
    out = report_path.with_name("validate.json")
    command = [sys.executable, "-m", "vision_exp.validate", "--url", URL, "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    print(done.stdout[-6000:], done.stderr[-2000:], flush=True)
    result = json.loads(out.read_text())
    states = [check["state"] for check in result["checks"]]
    counts = {state: states.count(state) for state in sorted(set(states))}
    skipped = [check["name"] for check in result["checks"] if check["state"] == "skipped"]
    words = f"exit {done.returncode}, {counts}; skipped: {', '.join(skipped) or 'none'}"
    return done.returncode == 0, words


if __name__ == "__main__":
    sys.exit({"stock": stock, "patched": patched}[sys.argv[1]](*sys.argv[2:]))
