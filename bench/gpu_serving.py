"""What serving costs on a GPU: a text-only decode step, and the first token of an image request.

    python bench/gpu_serving.py measure MODEL OUT.json      (once per tree and checkpoint)
    python bench/gpu_serving.py compare STOCK.json PATCHED.json VISION.json

`measure` runs the vLLM that is first on PYTHONPATH, in this process and with CUDA graphs. Compared
are the medians: patched over stock for the decode step, and on the vision checkpoint the first
token of an image request against that of a text request of the same length, beside the tower's
own time.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from gpu.rig import WIDE, Ask, Engine, picture, replaced, text_ids, with_images

BATCH, STEPS = 8, 200
REPEAT = 15
#: Text before and after the picture, and the tokens of its block at that position.
BEFORE, BLOCK, AFTER = 60, 369, 40
DECODE_LIMIT = 1.01
#: Beyond the tower itself, as a share of its time.
FIRST_TOKEN_LIMIT = 1.10


def measure(model: str, out: str) -> int:
    engine = Engine(
        model, enforce_eager=False, compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8]}
    )
    found: dict[str, Any] = {"decode_ms": decode_step(engine)}
    if getattr(engine.model, "vision", None) is not None:
        found |= first_token(engine)
    Path(out).write_text(json.dumps(found, indent=1))
    print(found)
    return 0


def decode_step(engine: Engine) -> list[float]:
    """Milliseconds of each decode step with ``BATCH`` text requests running, three rounds."""
    inner = engine.llm.llm_engine
    times = []
    for turn in range(3):
        engine.forget()
        for index in range(BATCH):
            ask = Ask(text_ids(60, 500 + index))
            inner.add_request(f"{turn}-{index}", ask.prompt(), greedy(STEPS))
        for _ in range(4):
            inner.step()
        while len(engine.scheduler.running) == BATCH:
            started = time.perf_counter()
            inner.step()
            times.append((time.perf_counter() - started) * 1e3)
        while inner.has_unfinished_requests():
            inner.step()
    return times


def first_token(engine: Engine) -> dict[str, list[float]]:
    """Milliseconds to the first token, every cache cold but the processor's for ``*_engine``."""
    import torch

    model = engine.model
    plain = model.embed_multimodal
    tower: list[tuple[Any, Any]] = []

    def timed(**kwargs: Any) -> Any:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        rows = plain(**kwargs)
        end.record()
        tower.append((start, end))
        return rows

    found: dict[str, list[float]] = {"image": [], "text": [], "image_engine": [], "tower": []}
    pictures = [picture(*WIDE, seed=900 + index) for index in range(REPEAT + 3)]
    with replaced(model, "embed_multimodal", timed):
        for index, image in enumerate(pictures):
            ask = with_images(BEFORE, [image], AFTER, 910)
            engine.forget()
            found["image"].append(timed_request(engine, ask))
            engine.llm.reset_prefix_cache()
            engine.llm.llm_engine.engine_core.reset_encoder_cache()
            found["image_engine"].append(timed_request(engine, ask))
            engine.forget()
            text = Ask(text_ids(BEFORE + BLOCK + AFTER, 950 + index))
            found["text"].append(timed_request(engine, text))
    torch.cuda.synchronize()
    found["tower"] = [start.elapsed_time(end) for start, end in tower]
    return {name: values[3:] for name, values in found.items()}


def timed_request(engine: Engine, ask: Ask) -> float:
    started = time.perf_counter()
    engine.llm.generate([ask.prompt()], greedy(1), use_tqdm=False)
    return (time.perf_counter() - started) * 1e3


def greedy(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def compare(stock_path: str, patched_path: str, vision_path: str) -> int:
    stock, patched, vision = (
        json.loads(Path(path).read_text()) for path in (stock_path, patched_path, vision_path)
    )
    base = statistics.median(stock["decode_ms"])
    good = True
    for name, found in (("patched", patched), ("patched, vision checkpoint", vision)):
        mine = statistics.median(found["decode_ms"])
        ratio = mine / base
        good = good and ratio <= DECODE_LIMIT
        print(f"decode step, {name}: {mine:.3f} ms, stock {base:.3f} ms, ratio {ratio:.4f}")
    middle = {name: statistics.median(vision[name]) for name in vision}
    for name in ("image", "image_engine"):
        extra = middle[name] - middle["text"]
        ratio = extra / middle["tower"]
        words = "with" if name == "image" else "without"
        print(
            f"first token {words} the picture's preparation: image {middle[name]:.1f} ms, text "
            f"{middle['text']:.1f} ms, difference {extra:.1f} ms = {ratio:.2f} of the tower's "
            f"{middle['tower']:.1f} ms"
        )
    extra = middle["image_engine"] - middle["text"]
    good = good and extra <= FIRST_TOKEN_LIMIT * middle["tower"]
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit({"measure": measure, "compare": compare}[sys.argv[1]](*sys.argv[2:]))
