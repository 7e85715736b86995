"""What the GPU checks share: result rows, prompts and images of fixed sizes, an offline engine.

Lengths are fixed and reused: vLLM compiles kernels per group of 64 tokens, 15 to 20 s each.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gpu.lib.answers import BYTE_IDS, PROBED, Answer, answer_of
from PIL import Image

PLACEHOLDER_ID = 129264


@dataclass(frozen=True)
class Row:
    """One line of the table. ``ok`` None means: measured or not run, nothing assessed."""

    name: str
    ok: bool | None
    detail: str
    seconds: float


class Report:
    """Collects rows and writes them after each one, so that a killed process loses nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []

    def add(self, name: str, ok: bool | None, detail: str, seconds: float = 0.0) -> None:
        self.rows.append(Row(name, ok, detail, round(seconds, 1)))
        mark = {True: "ok  ", False: "FAIL", None: "info"}[ok]
        print(f"[check] {mark} {name}: {detail}", flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps([asdict(row) for row in self.rows], indent=1))

    def run(self, name: str, check: Callable[[], tuple[bool | None, str]]) -> None:
        """Runs one check; an exception is a failure of that check and the others go on."""
        started = time.monotonic()
        try:
            ok, detail = check()
        except Exception as error:  # noqa: BLE001 - becomes a failed row, with its traceback
            traceback.print_exc()
            ok, detail = False, f"{type(error).__name__}: {error}"[:400]
        self.add(name, ok, detail, time.monotonic() - started)


def text_ids(count: int, seed: int) -> list[int]:
    """``count`` random byte tokens."""
    return np.random.default_rng(seed).integers(*BYTE_IDS, size=count).tolist()


def random_image(width: int, height: int, seed: int) -> Image.Image:
    """Smooth random colours: no two seeds alike, and not flat under any resize."""
    small = np.random.default_rng(seed).integers(0, 256, size=(7, 9, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


#: 28x28 patches, 10x10 cells, a block of 114 tokens and its leading pads.
SQUARE = (392, 392)
#: 42x74 patches, 14x25 cells, 366 tokens and its leading pads.
WIDE = (1036, 588)


@dataclass(frozen=True)
class Ask:
    """A prompt: token ids with one placeholder per image."""

    ids: list[int]
    images: tuple[Image.Image, ...] = ()

    def prompt(self) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt_token_ids": list(self.ids)}
        if self.images:
            prompt["multi_modal_data"] = {"image": list(self.images)}
        return prompt


def with_images(before: int, images: list[Image.Image], after: int, seed: int) -> Ask:
    """``before`` text tokens, the images with 20 tokens between them, ``after`` text tokens."""
    ids = text_ids(before, seed)
    for index in range(len(images)):
        ids += [PLACEHOLDER_ID]
        if index + 1 < len(images):
            ids += text_ids(20, seed + 1000 + index)
    return Ask(ids + text_ids(after, seed + 1), tuple(images))


def skip_warmup(*_model: Any) -> None:
    """Stands in for vLLM's warm-up of router kernels: 64 of them, for shapes of other models.

    From 0.27 on it is given the model; before 0.26 there is none.
    """


class Engine:
    """vLLM in this process, so that the checks can look at scheduler, runner and model.

    ``probed``: every answer consists of PROBED tokens and lists the log-probabilities of all of
    them at every step, so that `answers.distance` can compare any two. Else the 20 likeliest.
    """

    def __init__(self, model: str, *, probed: bool = False, **overrides: Any) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import vllm.model_executor.warmup.kernel_warmup as warmup
        from vllm import LLM

        warmup._warmup_ll_bf16_router_gemm = skip_warmup
        settings: dict[str, Any] = {
            "kv_cache_dtype": "fp8",
            "block_size": 256,
            "max_model_len": 4096,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 16,
            "gpu_memory_utilization": 0.12,
            "kv_cache_memory_bytes": 2 << 30,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "async_scheduling": False,
            "kernel_config": {
                "enable_flashinfer_autotune": False,
                "enable_cutedsl_warmup": False,
            },
            "seed": 0,
        }
        self.probed = probed
        if probed:
            # Those of the tokens left to choose from, not of the whole vocabulary.
            settings |= {"logprobs_mode": "processed_logprobs", "max_logprobs": len(PROBED)}
        self.llm = LLM(model=model, **(settings | overrides))
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.runner = core.model_executor.driver_worker.worker.model_runner

    @property
    def model(self) -> Any:
        return self.runner.get_model()

    def params(self, max_tokens: int) -> Any:
        from vllm import SamplingParams

        common: dict[str, Any] = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
        if self.probed:
            allowed = list(PROBED)
            return SamplingParams(**common, logprobs=len(allowed), allowed_token_ids=allowed)
        return SamplingParams(**common, logprobs=20)

    def ask(self, *asks: Ask, max_tokens: int = 8) -> list[Answer]:
        """Answers of all prompts, submitted together."""
        params = self.params(max_tokens)
        outputs = self.llm.generate([ask.prompt() for ask in asks], params, use_tqdm=False)
        return [answer_of(output) for output in outputs]

    def cold(self, ask: Ask, max_tokens: int = 8) -> Answer:
        """The answer with every cache emptied before."""
        self.forget()
        return self.ask(ask, max_tokens=max_tokens)[0]

    def forget(self) -> None:
        """Empties the prefix cache, the encoder cache and the processor's cache."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be emptied")
        self.forget_images()

    def forget_images(self) -> None:
        """Empties the encoder cache and the processor's cache."""
        self.llm.reset_mm_cache()
        self.llm.llm_engine.engine_core.reset_encoder_cache()

    @contextmanager
    def chunks_of(self, tokens: int) -> Iterator[None]:
        """Schedules at most ``tokens`` tokens a step."""
        before = self.scheduler.max_num_scheduled_tokens
        self.scheduler.max_num_scheduled_tokens = tokens
        try:
            yield
        finally:
            self.scheduler.max_num_scheduled_tokens = before


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of an instance for a while."""
    had = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
