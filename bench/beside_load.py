"""One load on one server: `vllm bench serve` of the vLLM on the path, called as its command is.

Imported once a process: its start costs more than a load. Requests come from a file (`custom_image`
in file order), so both servers get the same ones.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Printable ASCII of the test tokenizer: an answer is text of a known length on both servers.
ANSWERS = tuple(range(10, 90))


@dataclass(frozen=True)
class Load:
    """``clients`` at once, or ``rate`` requests a second; ``tokens`` of answer each."""

    data: Path
    requests: int
    tokens: int
    clients: int | None = None
    rate: float | None = None


def command(load: Load, url: str, model: str) -> list[str]:
    """The arguments of `vllm bench serve`. The probe request is left out: it would fill caches."""
    words = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--base-url", url]
    words += ["--model", model, "--served-model-name", "tiny", "--tokenizer-mode", "deepseek_v4"]
    words += ["--dataset-name", "custom_image", "--dataset-path", str(load.data)]
    words += ["--disable-shuffle", "--no-oversample", "--disable-tqdm", "--ignore-eos"]
    words += ["--num-prompts", str(load.requests), "--custom-output-len", str(load.tokens)]
    words += ["--ready-check-timeout-sec", "0", "--temperature", "0"]
    words += ["--extra-body", json.dumps({"allowed_token_ids": ANSWERS})]
    if load.clients:
        words += ["--max-concurrency", str(load.clients)]
    if load.rate:
        # Even gaps, not random ones: both servers see the same arrivals.
        words += ["--request-rate", str(load.rate), "--burstiness", "1000"]
    return words


def drive(load: Load, url: str, model: str) -> dict[str, Any]:
    """What `vllm bench serve` reports. Raises RuntimeError if a request failed."""
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    found = asyncio.run(serve.main_async(parser.parse_args(command(load, url, model))))
    if found["completed"] != load.requests:
        first = next(filter(None, found.get("errors", [])), "no reason given")
        raise RuntimeError(f"{found['completed']} of {load.requests} completed: {first[-600:]}")
    return found
