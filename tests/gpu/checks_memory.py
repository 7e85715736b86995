"""Memory of the tower, nothing left behind by 300 image requests, no pictures in decode steps.

checks_memory.py MODEL REPORT.json
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.rig import SQUARE, WIDE, Ask, Engine, Report, picture, replaced, with_images

REQUESTS = 300
#: The picture with the most patches: 24x138.
LARGEST = (1932, 336)


def main(folder: str, report_path: str) -> int:
    report = Report(Path(report_path))
    engine = Engine(folder)
    report.run("memory of the vision part", lambda: footprint(engine))
    report.run("decode steps carry no image payload", lambda: payload(engine))
    report.run(f"nothing leaks over {REQUESTS} image requests", lambda: leak(engine))
    return 0


def footprint(engine: Engine) -> tuple[bool | None, str]:
    model = engine.model
    held = sum(p.nbytes for part in (model.vision, model.aligner) for p in part.parameters())
    engine.forget()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rows: list[Any] = []
    plain = model.embed_multimodal

    def measured(**kwargs: Any) -> Any:
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        result = plain(**kwargs)
        torch.cuda.synchronize()
        rows.append((torch.cuda.max_memory_allocated() - start, [len(r) for r in result]))
        return result

    with replaced(model, "embed_multimodal", measured):
        engine.ask(with_images(60, [picture(*LARGEST, seed=90)], 40, 91), max_tokens=1)
    peak, counts = rows[0]
    detail = (
        f"{held / 2**20:.0f} MiB of parameters; the largest picture ({counts} rows) peaks at "
        f"{peak / 2**20:.0f} MiB; {before / 2**30:.2f} GiB held before"
    )
    return None, detail


def payload(engine: Engine) -> tuple[bool, str]:
    """Looks at what the scheduler sends: pictures with the prefill, nothing with the decode."""
    steps: list[tuple[int, int, int]] = []
    schedule = engine.scheduler.schedule

    def recorded(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        encoder = sum(len(v) for v in output.scheduled_encoder_inputs.values())
        carried = sum(len(r.mm_features or ()) for r in output.scheduled_new_reqs)
        steps.append((output.total_num_scheduled_tokens, encoder, carried))
        return output

    engine.forget()
    ask = with_images(60, [picture(*SQUARE, seed=92), picture(*WIDE, seed=93)], 40, 94)
    with replaced(engine.scheduler, "schedule", recorded):
        engine.ask(ask, max_tokens=6)
    prefill = [step for step in steps if step[0] > 1]
    decode = [step for step in steps if step[0] == 1]
    good = len(decode) >= 5 and all(step[1] == step[2] == 0 for step in decode)
    good = good and sum(step[1] for step in prefill) == 2
    return good, f"(tokens, encoder inputs, pictures carried): {prefill} then {decode[:3]}..."


def leak(engine: Engine) -> tuple[bool, str]:
    """Distinct pictures in batches of ten; afterwards every cache is as large as before."""
    manager = engine.scheduler.encoder_cache_manager

    def batch(first: int) -> list[Ask]:
        return [with_images(60, [picture(*SQUARE, seed=first + i)], 40, 95) for i in range(10)]

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
        f"allocated {before} bytes before, {after} after; at most {most} cached pictures, now "
        f"{len(engine.runner.encoder_cache)}; all slots reclaimable: {freeable}"
    )
    back = manager.num_free_slots == free and not engine.runner.encoder_cache
    return back and freeable and after - before <= 1 << 20, detail


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
