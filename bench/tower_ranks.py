"""What waiting for other ranks costs an image: the tower by heads and by images, on a CPU.

    python bench/tower_ranks.py [--ranks N] [--layers N] [--rounds N]

Ranks are processes that talk over gloo. Every collective is made slower by 0, 20 and 100
microseconds, as a network between two hosts does. By heads (`weights`) each block ends in two sums
over the ranks, by images (`data`) the ranks meet twice in a step, however many images it has. Small
matrices, so that the waits show; their number is that of the real tower. Needs vLLM.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "tests"), str(REPO / "tests" / "support")]

import native_tower  # noqa: E402 (the path is set above)
import tiny_config  # noqa: E402
import torch  # noqa: E402

DELAYS = (0, 20, 100)  # microseconds
GRIDS = [(6, 9), (6, 9)]
HIDDEN = 128
#: Most waits of an image: two for each block and one of the aligner; the exchange of a step.
LIMITS = {"weights": lambda layers: 2 * layers + 1, "data": lambda layers: 2}


class Waits:
    """Counts collectives and makes each of them slower."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0

    def slow(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def slowed(*args: Any, **kwargs: Any) -> Any:
            result = collective(*args, **kwargs)
            self.count += 1
            until = time.perf_counter() + self.seconds
            while time.perf_counter() < until:
                pass
            return result

        return slowed


@contextmanager
def slowed(waits: Waits) -> Iterator[None]:
    """The sums of vLLM's layers, and the exchange of rows."""
    import vllm.distributed
    import vllm.model_executor.layers.linear as layers

    places = (
        (layers, "tensor_model_parallel_all_reduce"),
        (vllm.distributed, "tensor_model_parallel_all_gather"),
    )
    stock = [(owner, name, getattr(owner, name)) for owner, name in places]
    for owner, name, function in stock:
        setattr(owner, name, waits.slow(function))
    try:
        yield
    finally:
        for owner, name, function in stock:
            setattr(owner, name, function)


def measure(rank: int, ranks: int, store: str, layers: int, rounds: int, pipe: Any) -> None:
    """One rank: milliseconds and waits for an image, by mode and delay."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    torch.set_num_threads(1)
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        init_distributed_environment(ranks, rank, f"file://{store}", rank, "gloo")
        initialize_model_parallel(ranks)
        found = {mode: times(mode, layers, rounds) for mode in LIMITS}
    pipe.send(found)


def times(mode: str, layers: int, rounds: int) -> dict[int, tuple[float, float]]:
    from vision_exp.config import VisionConfig
    from vision_exp.model import encoder
    from vision_exp.tower import Aligner, VisionTower
    from vision_exp.tower.parallel import VllmLinears

    sizes = {"vision_n_heads": 8, "vision_dim": 128, "hidden_size": HIDDEN}
    hf = SimpleNamespace(**tiny_config.vision_config(**sizes, vision_n_layers=layers))
    config = VisionConfig.from_hf_config(hf)
    linears = VllmLinears.for_config(config, data_parallel=mode == "data")
    model = SimpleNamespace(
        vision=VisionTower(config, linears),
        aligner=Aligner(config, linears),
        image_start=torch.zeros(HIDDEN),
        config=SimpleNamespace(hidden_size=HIDDEN),
    )
    native_tower.on_cpu(model.vision, model.aligner)
    for module in (model.vision, model.aligner):
        for parameter in module.parameters():
            parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.02)
    cells = torch.tensor([[-(-h // 3), -(-w // 3)] for h, w in GRIDS])
    given = {
        "patches": torch.rand(sum(h * w for h, w in GRIDS), 3, 14, 14),
        "vit_grid": torch.tensor(GRIDS),
        "llm_grid": cells,
        "perm": torch.cat([torch.arange(int(count)) for count in cells.prod(1)]),
    }
    found = {}
    waits = Waits()
    with slowed(waits), meets(waits, encoder):
        for delay in DELAYS:
            encoder.encode_images(model, data_parallel=mode == "data", **given)
            waits.count, waits.seconds = 0, delay * 1e-6
            spent = []
            for _ in range(rounds):
                begun = time.perf_counter()
                encoder.encode_images(model, data_parallel=mode == "data", **given)
                spent.append(time.perf_counter() - begun)
            found[delay] = (min(spent) * 1e3, waits.count / rounds)
    return found


@contextmanager
def meets(waits: Waits, encoder: Any) -> Iterator[None]:
    """The exchange's first message, which says whether all ranks have encoded theirs."""
    plain = encoder.raise_on_all_ranks

    @contextmanager
    def counted() -> Iterator[None]:
        with plain():
            yield
        waits.slow(lambda: None)()

    encoder.raise_on_all_ranks = counted
    try:
        yield
    finally:
        encoder.raise_on_all_ranks = plain


def run(ranks: int, layers: int, rounds: int) -> list[dict[str, Any]]:
    import vllm.model_executor.layers.linear  # noqa: F401  imported once, before the ranks part

    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VLLM_DIST_IDENT"] = Path(folder).name  # names the ranks' shared memory
        pipes, jobs = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            args = (rank, ranks, f"{folder}/store", layers, rounds, theirs)
            jobs.append(context.Process(target=measure, args=args))
            jobs[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            return [pipe.recv() for pipe in pipes]
        finally:
            for job in jobs:
                job.join(60)
                job.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    found = run(options.ranks, options.layers, options.rounds)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, gloo")
    print(f"{options.ranks} ranks, {options.layers} blocks, steps of {len(GRIDS)} images")
    good = True
    for mode, limit in LIMITS.items():
        most = limit(options.layers)
        for delay in DELAYS:
            spent = max(rank[mode][delay][0] for rank in found)
            count = max(rank[mode][delay][1] for rank in found)
            good = good and count <= most
            ratio = spent / max(rank["data"][delay][0] for rank in found)
            print(
                f"{mode:>8}  {delay:>4} us slower: {count:.0f} waits a step, at most {most}; "
                f"{spent:.1f} ms a step, {ratio:.2f} times data's"
            )
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
