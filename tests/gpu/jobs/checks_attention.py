"""The tower with every kind of attention that the card has, with CUDA graphs, against the floor.

    checks_attention.py REPORT.json

First what the start chooses: of all, with FlashAttention 3 taken away, and with none of vLLM's.
Then each kind alone, and last the kernels of other shapes that could be added, by themselves.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu.lib.rig import Report
from gpu_timing import matrix_rate, milliseconds
from gpu_tower import CASES, build, distance, in_float32, operations

from vision_exp.tower import attention, backends, graphs, split_kv, trial
from vision_exp.tower.attention import Flash, Kind

#: Most times the floor.
FULL_WAVES, WITHOUT = 1.6, 1.85
MEASURED = ("42x74", "24x138")
#: (rows, keys, warps, stages) beside those of split_kv.WHOLE.
TILES = [(64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 2), (128, 64, 4, 3), (128, 64, 8, 3)]
TILES += [(128, 128, 8, 2), (128, 128, 8, 3), (128, 32, 4, 4), (64, 32, 4, 4)]


def main(path: str) -> int:
    report = Report(Path(path))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    flash = attention.available_flash()  # imports vLLM, which switches torch's cuDNN attention off
    modules = build()
    exact = {name: exact_rows(modules, name) for name in MEASURED}
    every = backends.kinds(device, flash)
    without_3 = backends.kinds(device, Flash(tuple(v for v in flash.versions if v != 3)))
    choices: dict[str, tuple[list[Kind], float | None]] = {
        "as it starts": (every, FULL_WAVES if 3 in flash.versions else WITHOUT),
        "FlashAttention 3 taken away": (without_3, WITHOUT),
        "no FlashAttention of vLLM": (backends.kinds(device, Flash()), WITHOUT),
        **{f"{kind.name} alone": ([kind], None) for kind in every},
    }
    for name, (kinds, limit) in choices.items():
        with torch.inference_mode():
            one_choice(report, modules, exact, name, kinds, limit)
    report.add("kernels of other shapes", None, others(device))
    return 0 if all(row.ok is not False for row in report.rows) else 1


def patches_of(name: str) -> torch.Tensor:
    ((height, width),) = CASES[name][0]
    random = torch.Generator("cuda").manual_seed(height)
    patches = torch.rand((height * width, 3, 14, 14), device="cuda", generator=random)
    return patches.mul(2).sub(1).bfloat16()


@torch.inference_mode()
def exact_rows(modules: Any, name: str) -> tuple[torch.Tensor, float]:
    """Rows in float32, and how far plain torch in BF16 is from them."""
    tower, aligner = modules
    grids, patches = CASES[name][0], patches_of(name)
    exact = in_float32(aligner)(in_float32(tower).forward_plain(patches, grids), grids)
    return exact, distance(aligner(tower.forward_plain(patches, grids), grids), exact)


def one_choice(
    report: Report, modules: Any, exact: Any, name: str, kinds: list[Kind], limit: float | None
) -> None:
    tower, aligner = modules
    tower._graphs = None  # the memory of the last ones
    torch.cuda.empty_cache()
    graphs.prepare(tower, patches_of(MEASURED[0]), kinds)
    chosen, count = tower._backend.attention.name, len(tower._graphs or ())
    for case in MEASURED:
        grids, patches = CASES[case][0], patches_of(case)

        def mine(patches: torch.Tensor = patches, grids: Any = grids) -> torch.Tensor:
            return aligner(tower(patches, grids), grids)

        before, spent, after = matrix_rate(), milliseconds(mine), matrix_rate()
        floor = operations(grids) / ((before + after) / 2) * 1e3
        rows, plain_error = exact[case]
        error = distance(mine(), rows)
        ok = error <= 1.1 * plain_error and (limit is None or spent <= limit * floor)
        if limit is not None:
            ok = ok and count == len(graphs.SIZES)
        most = f", at most {limit}" if limit else ""
        report.add(
            f"tower, {name}, {case}",
            ok,
            f"{chosen}: {spent:.2f} ms, {spent / floor:.2f} times the floor of {floor:.2f}{most}; "
            f"{count} graphs; error {error:.4f}, plain PyTorch {plain_error:.4f}",
        )


def others(device: torch.device) -> str:
    """Microseconds of kernels that could be added, as the start tries them."""
    found = [
        Kind(
            f"Triton {tile}",
            partial(split_kv.packed, split_kv.Tile(*tile)),
            partial(split_kv.image, split_kv.Tile(*tile)),
        )
        for tile in TILES
    ]
    found += [
        Kind("cuDNN by a bias", attention.torch_packed, biased_cudnn),
        Kind("cuDNN by lengths", attention.torch_packed, ragged_cudnn),
    ]
    stage = trial.Stage(16, 64, device, graphs.capturing(torch.cuda.Stream()), graphs.milliseconds)
    said = []
    for kind in found:
        try:
            times = [trial.attempt(kind, stage, *size) for size in trial.SIZES]
            said.append(f"{kind.name}: {times[0]:.0f} and {times[1]:.0f} us")
        except Exception as error:  # noqa: BLE001 - measured only: what it says is the result
            said.append(f"{kind.name}: {type(error).__name__}: {str(error)[:120]}")
        print(said[-1], flush=True)
    return "; ".join(said)


@contextmanager
def cudnn() -> Iterator[None]:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        yield


def biased_cudnn(rows: int, heads: int, device: torch.device) -> attention.ImageAttention:
    of = attention.torch_image(rows, heads, device)

    def attend_of(keys: torch.Tensor) -> attention.Attend:
        attend = of(keys)

        def in_cudnn(qkv: torch.Tensor) -> torch.Tensor:
            with cudnn():
                return attend(qkv)

        return in_cudnn

    return attend_of


def ragged_cudnn(rows: int, heads: int, device: torch.device) -> attention.ImageAttention:
    queries = attention.cu_seqlens((rows,), device)

    def attend_of(keys: torch.Tensor) -> attention.Attend:
        def attend(qkv: torch.Tensor) -> torch.Tensor:
            given = (*qkv.unbind(1), None, queries, keys, rows, rows, False)
            return torch.ops.aten._cudnn_attention_forward(*given)[0].flatten(1)

        return attend

    return attend_of


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
