"""One engine of gpu_serving.py: what it runs when asked, and the milliseconds that it took."""

from __future__ import annotations

import cProfile
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import interleaved
from gpu.lib.rig import WIDE, Ask, Engine, random_image, replaced, text_ids, with_images
from visibility import image_pairs, prefill, text_prompt

#: Requests of a decode step, tokens of each, and prefills of one run.
BATCH, TOKENS, PREFILLS = 8, 34, 6
#: Text before and after the image, and the tokens of its block at that position.
BEFORE, BLOCK, AFTER = 60, 369, 40


def work(kind: str, model: str, replies: str) -> int:
    """One engine that answers requests for runs: of "text", or of "image" as well."""
    settings = {"cudagraph_capture_sizes": [1, 2, 4, 8]}
    engine = Engine(
        model, enforce_eager=False, compilation_config=settings, enable_prefix_caching=False
    )
    found: dict[str, Callable[[], Any]] = {
        "text": partial(text_run, engine),
        "own": partial(own_share, engine),
    }
    if kind == "image":
        seeds = iter(range(900, 10**6))
        found["first"] = lambda: first_token(engine, next(seeds))
        found["visible"] = partial(image_pairs, engine)
    return interleaved.serve(found, int(replies))


def text_run(engine: Engine) -> dict[str, list[float]]:
    """Milliseconds: prefills of one text, decode steps of ``BATCH`` texts."""
    ask = text_prompt()
    decode = []
    prefills = [prefill(engine, ask) for _ in range(PREFILLS)]
    for step in decode_steps(engine):
        started = time.perf_counter()
        step()
        decode.append((time.perf_counter() - started) * 1e3)
    return {"prefill": prefills, "decode": decode}


def own_share(engine: Engine) -> dict[str, float]:
    """Of one decode step of ``BATCH`` texts: all calls, those into vision_exp, their microseconds.

    Without the functions of others that it calls; the profiler makes every call slower.
    """
    profile = cProfile.Profile()
    steps = 0
    for step in decode_steps(engine):
        profile.enable()
        step()
        profile.disable()
        steps += 1
    every = profile.getstats()
    own = [
        entry
        for entry in every
        if not isinstance(entry.code, str) and "/vision_exp/" in entry.code.co_filename
    ]
    return {
        "all": sum(entry.callcount for entry in every) / steps,
        "calls": sum(entry.callcount for entry in own) / steps,
        "microseconds": sum(entry.inlinetime for entry in own) / steps * 1e6,
    }


def decode_steps(engine: Engine) -> Iterator[Callable[[], Any]]:
    """What runs one step, as long as ``BATCH`` text requests are being decoded."""
    inner = engine.llm.llm_engine
    for index in range(BATCH):
        inner.add_request(str(index), Ask(text_ids(60, 500 + index)).prompt(), greedy(TOKENS))
    for _ in range(4):
        inner.step()
    while len(engine.scheduler.running) == BATCH:
        yield inner.step
    while inner.has_unfinished_requests():
        inner.step()


def first_token(engine: Engine, seed: int) -> dict[str, Any]:
    """Milliseconds until the first token, (in the front end, in the engine), of three requests.

    A new image, the same one again with only the front end's caches warm, and as much text; of
    the new image's preparation the pixels' part and that of its name (vLLM parses and hashes any
    model's images); and the tower's time on the GPU, twice.
    """
    import torch
    from vllm.multimodal.processing import BaseProcessingInfo, ProcessorInputs

    from vision_exp.model import processor

    tower: list[tuple[Any, Any]] = []
    pixels: list[float] = []
    naming: list[float] = []
    model = engine.model
    encode = model.embed_multimodal

    def timed_tower(**kwargs: Any) -> Any:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        rows = encode(**kwargs)
        end.record()
        tower.append((start, end))
        return rows

    image = with_images(BEFORE, [random_image(*WIDE, seed=seed)], AFTER, 910)
    text = Ask(text_ids(BEFORE + BLOCK + AFTER, seed))
    found: dict[str, Any] = {}
    with replaced(model, "embed_multimodal", timed_tower):
        engine.forget()
        # Whatever comes first after a pause is slower: a text that does not count, and then image
        # and text in either order.
        request(engine, Ask(text_ids(BEFORE + BLOCK + AFTER, seed + 1)))
        if seed % 2:
            found["text"] = request(engine, text)
        with (
            clocked(processor, "images_to_patches", pixels),
            clocked(ProcessorInputs, "get_mm_hashes", naming),
            clocked(BaseProcessingInfo, "parse_mm_data", naming),
        ):
            found["image"] = request(engine, image)
        engine.llm.llm_engine.engine_core.reset_encoder_cache()
        found["again"] = request(engine, image)
        if not seed % 2:
            found["text"] = request(engine, text)
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in tower]
    return {**found, "tower": times, "pixels": sum(pixels), "naming": sum(naming)}


@contextmanager
def clocked(owner: Any, name: str, times: list[float]) -> Iterator[None]:
    """Adds the milliseconds of each call of ``owner``'s function ``name`` to ``times``."""
    call = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        found = call(*args, **kwargs)
        times.append((time.perf_counter() - started) * 1e3)
        return found

    with replaced(owner, name, timed):
        yield


def request(engine: Engine, ask: Ask) -> tuple[float, float]:
    """Milliseconds that one request takes to prepare, and then to its first token."""
    import torch

    inner = engine.llm.llm_engine
    torch.cuda.synchronize()
    started = time.perf_counter()
    inner.add_request("first", ask.prompt(), greedy(1))
    prepared = time.perf_counter()
    while inner.has_unfinished_requests():
        inner.step()
    return (prepared - started) * 1e3, (time.perf_counter() - prepared) * 1e3


def greedy(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


if __name__ == "__main__":
    sys.exit(work(*sys.argv[1:]))
