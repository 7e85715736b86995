"""Milliseconds for the images of a step on two GPUs, in both modes of the tower, beside one GPU.

    python bench/gpu_tower_ranks.py [--json FILE] [--report ROWS.json]

What a rank does for the images of a step, `encode_images`, from patches to rows in prompt order, on
real widths with random weights. `weights`: the ranks share every layer. `data`: each takes images.
The delay is added on the device before each exchange between the ranks, to stand for a network
between two hosts; it is no measurement of one. A time is the slower rank's, median of 20.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import released_config
from gpu.lib.rig import Report

SIZES = {**released_config.VISION, "hidden_size": released_config.LANGUAGE["hidden_size"]}
RANKS = 2
DELAYS = (0, 20, 100)
GRIDS = {"42x74": (42, 74), "28x28": (28, 28)}
COUNTS = (1, 4)
#: Most times one GPU's time for the same images, in data mode without a delay.
LIMITS = {1: 1.05, 4: 0.55}
REPEAT = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--report", type=Path, help="rows as the checks of tests/gpu write them")
    args = parser.parse_args()
    if torch.cuda.device_count() < RANKS:
        print(f"{torch.cuda.device_count()} GPUs here, {RANKS} needed: nothing was measured")
        return 1
    print(f"{RANKS} x {torch.cuda.get_device_name()}")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (folder,), nprocs=RANKS)
        times = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    found = {name: max(each[name] for each in times) for name in times[0]}
    report = Report(args.report) if args.report else None
    good = True
    for grid in GRIDS:
        for count in COUNTS:
            ok, words = assess(found, grid, count)
            good = good and ok
            print(f"{'ok  ' if ok else 'FAIL'} {count} of {grid}: {words}")
            if report:
                report.add(f"tower on {RANKS} GPUs, {count} of {grid}", ok, words)
    if args.json:
        args.json.write_text(json.dumps({"milliseconds": found}, indent=1))
    return 0 if good else 1


def case(mode: str, grid: str, count: int, delay: int = 0) -> str:
    return f"{mode} {count} of {grid} +{delay} us"


def assess(found: dict[str, float], grid: str, count: int) -> tuple[bool, str]:
    """Data mode against one GPU, by the limit; all other times beside it."""
    one = found[case("one", grid, count)]
    ratio = found[case("data", grid, count)] / one
    words = [f"one GPU {one:.2f} ms; data mode {ratio:.2f} times it, at most {LIMITS[count]}"]
    for mode in ("data", "weights"):
        times = [f"{found[case(mode, grid, count, delay)]:.2f}" for delay in DELAYS]
        words.append(f"{mode} {', '.join(times)} ms with {', '.join(map(str, DELAYS))} us a sum")
    return ratio <= LIMITS[count], "; ".join(words)


def rank_main(rank: int, folder: str) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    torch.cuda.set_device(rank)
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        init_distributed_environment(RANKS, rank, f"file://{folder}/store", rank, "nccl")
        initialize_model_parallel(RANKS, 1)
        times = measure(rank)
    Path(folder, f"{rank}.json").write_text(json.dumps(times))
    torch.distributed.destroy_process_group()


def measure(rank: int) -> dict[str, float]:
    """Milliseconds by case; one GPU's are those of rank 0, 0 on the others."""
    from vision_exp.model.encoder import encode_images

    times = {}
    for mode in ("one", "data", "weights"):
        model = build(1 if mode != "weights" else RANKS)
        for grid, size in GRIDS.items():
            for count in COUNTS:
                inputs = step([size] * count)

                def run(mode: str = mode, model: Any = model, inputs: Any = inputs) -> None:
                    encode_images(model, data_parallel=mode == "data", **inputs)

                for delay in DELAYS if mode != "one" else (0,):
                    idle = mode == "one" and rank
                    with_delay(delay)
                    times[case(mode, grid, count, delay)] = 0.0 if idle else milliseconds(run, mode)
                    torch.distributed.barrier()
        with_delay(0)
        del model
    return times


def build(ranks: int) -> SimpleNamespace:
    """Tower and aligner with random weights, whole or this rank's part of them."""
    from vision_exp.config import VisionConfig
    from vision_exp.tower import Aligner, VisionTower
    from vision_exp.tower.parallel import VllmLinears

    config = VisionConfig.from_hf_config(SimpleNamespace(model_type="deepseek_v4", **SIZES))
    linears = VllmLinears(tp_size=ranks)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            tower, aligner = VisionTower(config, linears), Aligner(config, linears)
            start = torch.zeros(config.hidden_size)
    finally:
        torch.set_default_dtype(default)
    for module in (tower, aligner):
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
            else:
                parameter.data.fill_(1)
    return SimpleNamespace(
        vision=tower.eval(), aligner=aligner.eval(), image_start=start, config=config
    )


def step(grids: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """What the processor hands to the model for images of these patch grids."""
    cells = [(-(-height // 3), -(-width // 3)) for height, width in grids]
    rows = sum(height * width for height, width in grids)
    return {
        "patches": torch.rand(rows, 3, 14, 14, device="cuda").mul(2).sub(1).bfloat16(),
        "vit_grid": torch.tensor(grids),
        "llm_grid": torch.tensor(cells),
        "perm": torch.cat([torch.randperm(h * w, device="cuda") for h, w in cells]),
    }


def with_delay(microseconds: int) -> None:
    """From now on every exchange of this rank's group waits so long on the device before."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    for name in ("all_reduce", "all_gather"):
        vars(group).pop(name, None)
        if not microseconds:
            continue
        plain: Callable[..., Any] = getattr(group, name)
        cycles = int(microseconds * cycles_per_microsecond())

        def delayed(*args: Any, plain: Any = plain, cycles: int = cycles, **kwargs: Any) -> Any:
            torch.cuda._sleep(cycles)
            return plain(*args, **kwargs)

        setattr(group, name, delayed)


def cycles_per_microsecond() -> float:
    """Of the card's clock now, which `torch.cuda._sleep` counts."""
    cycles = 10_000_000
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize()
    return cycles / (begin.elapsed_time(end) * 1e3)


def milliseconds(run: Callable[[], Any], mode: str) -> float:
    """Wall time of a call until the device is done; both ranks begin together."""
    times = []
    for index in range(3 + REPEAT):
        torch.cuda.synchronize()
        if mode != "one":
            torch.distributed.barrier()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if index >= 3:
            times.append((time.perf_counter() - began) * 1e3)
    return sorted(times)[REPEAT // 2]


if __name__ == "__main__":
    sys.exit(main())
