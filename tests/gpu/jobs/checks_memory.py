"""Memory of the tower, nothing left behind by 300 image requests, no images in decode steps.

checks_memory.py MODEL REPORT.json
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu.jobs.checks_compile_stalls import graph_bytes, stalls
from gpu.jobs.checks_shared_encoding import assess_story, story
from gpu.lib.rig import SQUARE, WIDE, Ask, Engine, Report, random_image, replaced, with_images
from gpu.lib.steps import count_encoder

REQUESTS = 300


def main(folder: str, report_path: str) -> int:
    report = Report(Path(report_path))
    engine = Engine(folder)
    report.run("memory of the vision part", lambda: footprint(engine))
    count_encoder(engine)
    report.run("images of new sizes do not wait for compiling", lambda: stalls(engine))
    report.run("the last consumer frees an encoding", lambda: assess_story(story(engine)))
    report.run("decode steps carry no image payload", lambda: payload(engine))
    report.run(f"nothing leaks over {REQUESTS} image requests", lambda: leak(engine))
    return 0


def footprint(engine: Engine) -> tuple[bool, str]:
    """What the tower holds, and what encoding the image with the most patches takes on top.

    The graphs' intermediates lie in a pool of their own that start-up allocates, so a replay takes
    little; the peak is that of the same call without graphs.
    """
    from vision_exp.model.dummy import most_patches_size

    model = engine.model
    held = sum(p.nbytes for part in (model.vision, model.aligner) for p in part.parameters())
    size = most_patches_size(model.vision.config)
    before = torch.cuda.memory_allocated()
    replay = encoding_peak(engine, size)
    with replaced(model.vision, "_graphs", None):
        eager = encoding_peak(engine, size)
    return assess_footprint(held, graph_bytes(), eager, replay, before, size)


def encoding_peak(engine: Engine, size: tuple[int, int]) -> int:
    """Most bytes allocated at once, beyond what was before, while one image is encoded."""
    model = engine.model
    plain = model.embed_multimodal
    peaks: list[int] = []

    def measured(**kwargs: Any) -> Any:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        rows = plain(**kwargs)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - start)
        return rows

    with replaced(model, "embed_multimodal", measured):
        for seed in (90, 91):  # the first may compile
            engine.forget()
            engine.ask(with_images(60, [random_image(*size, seed=seed)], 40, seed), max_tokens=1)
    return peaks[-1]


def assess_footprint(
    held: int, pool: int, eager: int, replay: int, before: int, size: tuple[int, int]
) -> tuple[bool, str]:
    """Bytes of parameters, of the graphs' pool, of a call without and with graphs, in use before.

    A peak or a pool that holds less than the image's own activations was not measured.
    """
    # Two values of the residual stream in BF16: 1024 wide, a row for each patch of 14x14 pixels.
    least = 2 * (size[0] // 14) * (size[1] // 14) * 1024 * 2
    detail = (
        f"{held / 2**20:.0f} MiB of parameters, {pool / 2**20:.0f} MiB for the tower's graphs; "
        f"the largest image ({size[0]}x{size[1]}) peaks at {eager / 2**20:.0f} MiB without "
        f"graphs, {replay / 2**20:.0f} with them; {before / 2**30:.2f} GiB held before"
    )
    return min(pool, eager) > least and eager > replay > 0, detail


def payload(engine: Engine) -> tuple[bool, str]:
    """Looks at what the scheduler sends: images with the prefill, nothing with the decode."""
    steps: list[tuple[int, int, int]] = []
    schedule = engine.scheduler.schedule

    def recorded(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        encoder = sum(len(v) for v in output.scheduled_encoder_inputs.values())
        carried = sum(len(r.mm_features or ()) for r in output.scheduled_new_reqs)
        steps.append((output.total_num_scheduled_tokens, encoder, carried))
        return output

    engine.forget()
    ask = with_images(60, [random_image(*SQUARE, seed=92), random_image(*WIDE, seed=93)], 40, 94)
    with replaced(engine.scheduler, "schedule", recorded):
        engine.ask(ask, max_tokens=6)
    prefill = [step for step in steps if step[0] > 1]
    decode = [step for step in steps if step[0] == 1]
    good = len(decode) >= 5 and all(step[1] == step[2] == 0 for step in decode)
    good = good and sum(step[1] for step in prefill) == 2
    return good, f"(tokens, encoder inputs, images carried): {prefill} then {decode[:3]}..."


def leak(engine: Engine) -> tuple[bool, str]:
    """Distinct images in batches of ten; afterwards every cache is as large as before."""
    manager = engine.scheduler.encoder_cache_manager

    def batch(first: int) -> list[Ask]:
        return [with_images(60, [random_image(*SQUARE, seed=first + i)], 40, 95) for i in range(10)]

    engine.forget()
    engine.ask(*batch(1000), max_tokens=1)
    engine.forget()
    torch.cuda.synchronize()
    before, free = torch.cuda.memory_allocated(), manager.num_free_slots
    most = 0
    for first in range(2000, 2000 + REQUESTS, 10):
        engine.ask(*batch(first), max_tokens=1)
        most = max(most, len(engine.runner.encoder_cache))
    freeable = manager.num_freeable_slots == manager.cache_size
    engine.forget()
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated()
    detail = (
        f"allocated {before} bytes before, {after} after; at most {most} cached images, now "
        f"{len(engine.runner.encoder_cache)}; all slots reclaimable: {freeable}"
    )
    back = manager.num_free_slots == free and not engine.runner.encoder_cache
    return back and freeable and after - before <= 1 << 20, detail


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
