"""Images of sizes not seen before take no longer than those seen: nothing is compiled for them.

All prompts have one length, so that what vLLM compiles per number of tokens does not count.
"""

from __future__ import annotations

import time
from statistics import median

import torch
from gpu.lib.rig import Ask, Engine, random_image, text_ids, with_images
from gpu.reference.image import block_of

#: Sizes in pixels of eight grids, none of them resized, none used elsewhere.
NEW = [
    (420, 364),
    (448, 448),
    (504, 392),
    (616, 504),
    (700, 560),
    (812, 588),
    (1120, 420),
    (336, 1008),
]
#: Tokens of every prompt: of one with the wide image and 100 tokens of text.
TOTAL, BEFORE = 469, 60
LATER = 3
#: How much longer than the later ones a first request may take.
FACTOR = 3.0


def prompt(size: tuple[int, int], seed: int) -> Ask:
    """An image of ``size`` among text, TOTAL tokens in all. ValueError if it takes too many."""
    width, height = size
    cells = (-(-height // 42), -(-width // 42))
    after = TOTAL - BEFORE - len(block_of(cells, BEFORE)[0])
    if after < 1:
        raise ValueError(f"an image of {width}x{height} leaves no room in {TOTAL} tokens")
    return with_images(BEFORE, [random_image(width, height, seed=seed)], after, seed)


def graph_bytes() -> int:
    """Bytes held for CUDA graphs, in the allocator's pools that are not the default one."""
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))


def stalls(engine: Engine) -> tuple[bool, str]:
    """Seconds of the first and later requests of every new size."""
    for run in range(2):  # what the prompts' length takes the first time
        timed(engine, Ask(text_ids(TOTAL, 99 + run)))
        timed(engine, prompt((1036, 588), 4000 + run))
    graphs = engine.model.vision._graphs or ()
    before = (len(graphs), graph_bytes())
    first, later = [], []
    for index, size in enumerate(NEW):
        first.append(timed(engine, prompt(size, 4100 + index)))
        later += [timed(engine, prompt(size, 4200 + 10 * index + run)) for run in range(LATER)]
    after = (len(graphs), graph_bytes())
    return assess_stalls(first, later, before, after)


def assess_stalls(
    first: list[float], later: list[float], before: tuple[int, int], after: tuple[int, int]
) -> tuple[bool, str]:
    """``before`` and ``after``: number of the tower's graphs, and bytes held for graphs."""
    usual = median(later)
    detail = (
        f"first requests of {len(first)} sizes {1000 * max(first):.0f} ms at most, "
        f"{1000 * median(first):.0f} in the middle; later ones {1000 * usual:.0f}, at most "
        f"{1000 * max(later):.0f}; tower graphs {before[0]} before, {after[0]} after, "
        f"{after[1] - before[1]} bytes more"
    )
    return max(first) <= FACTOR * usual and before == after and before[0] > 0, detail


def timed(engine: Engine, ask: Ask) -> float:
    """Seconds of one cold request of one token."""
    engine.forget()
    torch.cuda.synchronize()
    started = time.perf_counter()
    engine.ask(ask, max_tokens=1)
    return time.perf_counter() - started
