"""What span visibility costs in prefill, on a GPU.

    python bench/visibility.py measure MODEL OUT.json       (once per tree and checkpoint)
    python bench/visibility.py compare STOCK.json PATCHED.json VISION.json

`measure` times prefill steps of the vLLM that is first on PYTHONPATH, in this process: a text
prompt, and on a vision checkpoint an image prompt with visibility and without, by turns in one run,
the picture's encoder output cached so that the tower is not timed. Compared are medians: text
prefill patched over stock (same text-only checkpoint) and image prefill visible over causal.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from gpu.rig import WIDE, Ask, Engine, picture, text_ids, with_images

REPEAT = 25
WARM = 3
#: Text, and text with one picture of 369 tokens: the same number of rows.
TEXT, BEFORE, AFTER = 1409, 60, 980
TEXT_LIMIT = 1.01
IMAGE_LIMIT = 1.10


def measure(model: str, out: str) -> int:
    engine = Engine(model, enable_prefix_caching=False)
    found: dict[str, Any] = {"text_ms": []}
    ask = Ask(text_ids(TEXT, 3))
    for turn in range(WARM + REPEAT):
        keep(found["text_ms"], turn, prefill(engine, ask))
    if getattr(engine.model, "vision", None) is not None:
        found |= {"visible_ms": [], "causal_ms": []}
        image = with_images(BEFORE, [picture(*WIDE, seed=2)], AFTER, 4)
        from gpu.visibility_check import causal

        for turn in range(WARM + REPEAT):
            keep(found["visible_ms"], turn, prefill(engine, image))
            with causal(engine):
                keep(found["causal_ms"], turn, prefill(engine, image))
    Path(out).write_text(json.dumps(found, indent=1))
    print({name: round(statistics.median(times), 3) for name, times in found.items()})
    return 0


def keep(times: list[float], turn: int, milliseconds: float) -> None:
    if turn >= WARM:
        times.append(milliseconds)


def prefill(engine: Engine, ask: Ask) -> float:
    """Milliseconds of the one step that prefills the prompt and samples its first token."""
    import torch

    inner = engine.llm.llm_engine
    inner.add_request("prefill", ask.prompt(), engine.params(1))
    torch.cuda.synchronize()
    started = time.perf_counter()
    outputs = inner.step()
    torch.cuda.synchronize()
    took = (time.perf_counter() - started) * 1e3
    if not (outputs and outputs[0].finished):
        raise RuntimeError("the prompt took more than one step")
    return took


def compare(stock: str, patched: str, vision: str) -> int:
    before, after, image = (json.loads(Path(path).read_text()) for path in (stock, patched, vision))
    text = statistics.median(after["text_ms"]) / statistics.median(before["text_ms"])
    # By turns in one run: the median of the pairs' ratios drifts with neither clock nor heat.
    pairs = zip(image["visible_ms"], image["causal_ms"], strict=True)
    wide = statistics.median(visible / causal for visible, causal in pairs)
    good = text <= TEXT_LIMIT and wide <= IMAGE_LIMIT
    print(f"text prefill, patched over stock: {text:.3f} (at most {TEXT_LIMIT})")
    print(f"image prefill, visible over causal: {wide:.3f} (at most {IMAGE_LIMIT})")
    return 0 if good else 1


if __name__ == "__main__":
    verb, *paths = sys.argv[1:]
    sys.exit({"measure": measure, "compare": compare}[verb](*paths))
