"""Tensor parallelism over two GPUs: the answers of one GPU, half the tower per rank, a soak.

    checks_two.py MODEL REPORT.json LOGDIR

Serves the checkpoint on one GPU, then on two with the tower sharded, with the tower in data mode,
and sharded with drafting on. Answers may part from the one-GPU answers at near ties only.
"""

from __future__ import annotations

import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.checks_draft import TRIED
from gpu.checks_server import URL, data_url, healthy, message, server
from gpu.rig import SQUARE, WIDE, Report

from vision_exp.validate_client import Answer, Client
from vision_exp.validate_judge import same

SOAK_SECONDS, CLIENTS = 180, 8
TWO = ("--tensor-parallel-size", "2")
MODES: dict[str, tuple[str, ...]] = {
    "one GPU": (),
    "two, sharded tower": TWO,
    "two, tower in data mode": (*TWO, "--mm-encoder-tp-mode", "data"),
}


def main(model: str, report_path: str, logs: str) -> int:
    report = Report(Path(report_path))
    answers: dict[str, list[Answer]] = {}
    weights: dict[str, list[float]] = {}
    for mode, options in MODES.items():
        log = Path(logs) / f"two-{mode.replace(' ', '-').replace(',', '')}.log"
        with server(model, log, *options) as process:
            if process.poll() is not None or not healthy():
                report.add(f"{mode}: serves", False, log.read_text(errors="replace")[-600:])
                continue
            answers[mode] = [ask(parts) for parts in requests()]
            if mode == "two, sharded tower":
                report.run("eight clients for three minutes", soak)
        words = log.read_text(errors="replace")
        weights[mode] = [float(size) for size in re.findall(r"loading took ([\d.]+) GiB", words)]
        report.run(f"{mode}: one overlay in all processes", lambda w=words: digests(w))
    for mode in list(MODES)[1:]:
        report.run(f"{mode}: answers of one GPU", lambda m=mode: compare(answers, m))
    report.add("GiB of weights per rank", None, json.dumps(weights))
    report.run("two, sharded, drafting", lambda: drafting(model, Path(logs), answers))
    return 0


def requests() -> list[tuple[str, ...]]:
    square, wide = data_url(*SQUARE, seed=1), data_url(*WIDE, seed=2)
    return [
        ("Hello there.",),
        ("See", square, "and say."),
        (wide, "What?"),
        (square, wide, "Both?"),
    ]


def ask(parts: tuple[str, ...]) -> Answer:
    return Client(URL, "tiny").ask(message(*parts)[0]["content"], max_tokens=8)


def compare(answers: dict[str, list[Answer]], mode: str) -> tuple[bool, str]:
    found = [same(a, b) for a, b in zip(answers["one GPU"], answers[mode], strict=True)]
    return all(good for good, _ in found), "; ".join(words for _, words in found)


def digests(words: str) -> tuple[bool, str]:
    lines = re.findall(r"\[vision-exp\] active pid=(\d+).*overlay=(\w+)", words)
    overlays = {overlay for _, overlay in lines}
    return len(overlays) == 1 and bool(lines), f"{len(dict(lines))} processes, overlays {overlays}"


def soak() -> tuple[bool, str]:
    """Clients that ask on without a pause; every answer must be what its first one was."""
    until = time.monotonic() + SOAK_SECONDS

    def one(index: int) -> tuple[int, int]:
        parts = requests()[index % 4]
        first, count, other = ask(parts), 1, 0
        while time.monotonic() < until:
            other += not same(first, ask(parts))[0]
            count += 1
        return count, other

    with ThreadPoolExecutor(CLIENTS) as pool:
        done = list(pool.map(one, range(CLIENTS)))
    total, others = (sum(column) for column in zip(*done, strict=True))
    return others == 0, f"{total} answers without an error, {others} unlike their first"


def drafting(model: str, logs: Path, answers: dict[str, list[Answer]]) -> tuple[bool, str]:
    for k in TRIED:
        speculation: dict[str, Any] = {"method": "dspark", "num_speculative_tokens": k}
        log = logs / f"two-draft-{k}.log"
        options = (*TWO, "--speculative-config", json.dumps(speculation))
        with server(model, log, *options) as process:
            if process.poll() is not None:
                continue
            answers["drafting"] = [ask(parts) for parts in requests()]
        good, words = compare(answers, "drafting")
        return good, f"k={k}: {words}"
    return False, f"no server started with k of {TRIED}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
