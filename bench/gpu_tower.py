"""Tower and aligner on a GPU: milliseconds beside the arithmetic floor and the native tower.

    python bench/gpu_tower.py [--native vision.py] [--json FILE] [--report ROWS.json]

The floor is the number of operations over the card's rate for a large BF16 matrix product of random
data, measured right before and after: it changes with the card's clock, by 6 % within a minute.

``--native`` is the file `models/deepseek_v4/common/vision.py` of a vLLM that serves the model by
itself (0.30.0 or later); it needs a vLLM to import its layers from, gets the same weights and
encodes one image after the other, as that vLLM does; its digest is kept with the figures, since
releases differ. Errors are distances from the same modules in float32; ours may be a tenth larger
than that of tower.py in BF16.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import native_tower
import released_config
from gpu.lib.rig import Report
from gpu_timing import graphed, matrix_rate, milliseconds

from vision_exp.config import VisionConfig
from vision_exp.tower import Aligner, VisionTower, attention, fused

SIZES = {**released_config.VISION, "hidden_size": released_config.LANGUAGE["hidden_size"]}
#: name -> (grids in one call, most times the floor)
CASES: dict[str, tuple[list[tuple[int, int]], float | None]] = {
    "42x74": ([(42, 74)], 1.6),
    "24x138": ([(24, 138)], 1.6),
    "8 of 28x28": ([(28, 28)] * 8, 3.0),
    "28x28": ([(28, 28)], None),
    "4 mixed": ([(42, 74), (28, 28), (24, 138), (30, 33)], None),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--native", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--report", type=Path, help="rows as the checks of tests/gpu write them")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, {matrix_rate() / 1e12:.0f} TFLOP/s in BF16 at first")
    tower, aligner = build()
    native, why, digest = None, "--native not given", "not given"
    if args.native:
        digest = hashlib.sha256(args.native.read_bytes()).hexdigest()[:12]
        try:
            native = load_native(args.native, tower, aligner)
        except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            why = f"{type(error).__name__}: {error}"
    if native is None:
        print(f"native tower: not run, {why}")
    started = start_up(tower)
    rows = [measure(name, tower, aligner, native) for name in CASES]
    print_table(rows)
    if args.native and native is None:
        rows.append({"case": "native", "ok": False, "why": why})
    if args.report:
        report = Report(args.report)
        report.add("tower, start-up", None, f"{started}; native's vision.py {digest}")
        for row in rows:
            report.add(f"tower and aligner, {row['case']}", row["ok"], words(row))
    if args.json:
        kept = {"native vision.py": digest, "rows": rows}
        args.json.write_text(json.dumps(kept, indent=1))
    return 0 if all(row["ok"] for row in rows) else 1


def operations(grids: list[tuple[int, int]]) -> float:
    """Multiplications and additions of tower and aligner."""
    dim, inner, layers = SIZES["vision_dim"], SIZES["vision_inter_dim"], SIZES["vision_n_layers"]
    hidden = SIZES["hidden_size"]
    total = 0.0
    for height, width in grids:
        rows = height * width
        cells = -(-height // 3) * -(-width // 3)
        linear = 4 * dim * dim + 3 * dim * inner
        total += 2 * rows * 588 * dim + layers * (2 * rows * linear + 4 * rows * rows * dim)
        total += 2 * cells * (9 * dim * hidden + hidden * hidden)
    return total


def build() -> tuple[VisionTower, Aligner]:
    """Random weights: BF16 linear layers, float32 norms."""
    config = VisionConfig.from_hf_config(SimpleNamespace(model_type="deepseek_v4", **SIZES))
    with torch.device("cuda"):
        tower, aligner = VisionTower(config), Aligner(config)
    for module in (tower, aligner):
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, parameter.shape[1] ** -0.5)
    for module in [m for part in (tower, aligner) for m in part.modules()]:
        if isinstance(module, torch.nn.Linear):
            module.bfloat16()
    return tower.eval(), aligner.eval()


@torch.inference_mode()
def measure(name: str, tower: Any, aligner: Any, native: Any) -> dict[str, Any]:
    grids, limit = CASES[name]
    counts = [height * width for height, width in grids]
    patches = torch.rand(sum(counts), 3, 14, 14, device="cuda").mul(2).sub(1).bfloat16()

    def mine() -> torch.Tensor:
        return aligner(tower(patches, grids), grids)

    def plain() -> torch.Tensor:
        return aligner(tower.forward_plain(patches, grids), grids)

    before, ours, after = matrix_rate(), milliseconds(mine), matrix_rate()
    rate = (before + after) / 2
    floor = operations(grids) / rate * 1e3
    row: dict[str, Any] = {"case": name, "TFLOP/s": rate / 1e12, "floor": floor, "ours": ours}
    row["plain"] = milliseconds(plain, repeat=5)
    exact = in_float32(tower).forward_plain(patches, grids)
    exact = in_float32(aligner)(exact, grids)
    row["error"], row["plain error"] = distance(mine(), exact), distance(plain(), exact)
    row["ratio"] = row["ours"] / floor
    row["limit"] = limit
    row["graph"] = graphed(mine)
    with launched(tower):
        row["launched"] = milliseconds(mine)
    with launched(tower, attention.torch_packed):
        row["torch attention"] = milliseconds(mine)
        try:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                row["cudnn attention"] = milliseconds(mine)
        except RuntimeError as error:
            print(f"cuDNN attention: not run, {error}")
    row |= parts(tower, patches, counts)
    ok = (limit is None or row["ratio"] <= limit) and row["error"] <= 1.1 * row["plain error"]
    if native is not None:

        def theirs() -> torch.Tensor:
            parts = [
                native.aligner(native.tower(piece, *grid), *grid)
                for piece, grid in zip(patches.split(counts), grids, strict=True)
            ]
            return torch.cat(parts)

        row["native"] = milliseconds(theirs)
        row["native error"] = distance(theirs(), exact)
        ok = ok and row["ours"] <= row["native"]
    row["ok"] = ok
    return row


def in_float32(module: Any) -> Any:
    """The same weights, wide: what both BF16 computations are rounded from."""
    names = ("_graphs", "_backend")
    captured = {name: vars(module).pop(name) for name in names if name in vars(module)}
    wide = copy.deepcopy(module).float()
    vars(module).update(captured)
    return wide


def parts(tower: Any, patches: torch.Tensor, counts: list[int]) -> dict[str, float]:
    """Where the time goes: attention, linear layers of the blocks, what is fused by hand.

    SwiGLU is part of the linear layers where their product applies it.
    """
    rows, block = sum(counts), tower.blocks[0]
    x, hidden = (torch.randn(rows, n, device="cuda").bfloat16() for n in (1024, 2816))
    qkv, gate_up = block.attn.wqkv(x).unflatten(-1, (3, 16, 64)), block.mlp.w1(x)
    angles, step, sums = torch.rand(rows, 32, device="cuda"), x * 1e-3, x.clone()
    backend = tower._backend
    attend = backend.attention.packed
    gated_linear, pdl = backend.gated_linear, backend.pdl

    def linears() -> None:
        for _ in range(32):
            block.attn.wqkv(x), block.attn.wo(x), sums.addmm_(hidden, block.mlp.w2.weight.t())
            gated_linear(x, block.mlp.w1.weight) if gated_linear else block.mlp.w1(x)

    def by_hand() -> None:
        for _ in range(32):
            fused.add_norm(x, step, block.norm1, pdl)
            fused.add_norm(x, None, block.norm2, pdl)
            fused.apply_rotary_(qkv, angles, angles, pdl)
            if gated_linear is None:
                fused.swiglu(gate_up)

    return {
        "of it attention": graphed(lambda: [attend(qkv, counts) for _ in range(32)]),
        "linears": graphed(linears),
        "fused": graphed(by_hand),
    }


@contextmanager
def launched(tower: Any, attend: attention.AttendPacked | None = None) -> Iterator[None]:
    """The fused blocks launched one by one for a while, with their own attention or another."""
    backend, captured = tower._backend, tower._graphs
    if attend:
        other = replace(backend.attention, packed=attend)
        tower._backend = replace(backend, attention=other)
    tower._graphs = None
    try:
        yield
    finally:
        tower._backend, tower._graphs = backend, captured


@torch.inference_mode()
def start_up(tower: Any) -> str:
    """The first call: compiles the kernels and captures the graphs."""
    held, begun = torch.cuda.memory_reserved(), time.perf_counter()
    patches = torch.rand(28 * 28, 3, 14, 14, device="cuda").bfloat16()
    tower(patches, (28, 28))
    torch.cuda.synchronize()
    seconds, kept = time.perf_counter() - begun, torch.cuda.memory_reserved() - held
    count = len(tower._graphs or ())
    found = f"first call {seconds:.1f} s, {count} graphs, {kept / 2**20:.0f} MiB reserved"
    print(found)
    return found


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def load_native(path: Path, tower: Any, aligner: Any) -> Any:
    """The native modules with our weights, built from this process's vLLM. ImportError without."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:29555", 0, "nccl")
        initialize_model_parallel(1, 1)
        module = native_tower.load(path)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("cuda"):
                config = SimpleNamespace(**SIZES)
                theirs = SimpleNamespace(
                    tower=module.DeepseekV4ViT(config), aligner=module.DeepseekV4Aligner(config)
                )
        finally:
            torch.set_default_dtype(default)
    for mine, other in ((tower, theirs.tower), (aligner, theirs.aligner)):
        other.load_state_dict(mine.state_dict(), strict=True)
    return theirs


def words(row: dict[str, Any]) -> str:
    if "why" in row:
        return f"not run, {row['why']}"
    limit = f", at most {row['limit']}" if row["limit"] else ""
    native = f"native {row['native']:.1f} ms, " if "native" in row else "native not run, "
    return (
        f"{row['ours']:.2f} ms, {row['ratio']:.2f} times the floor of {row['floor']:.2f} at "
        f"{row['TFLOP/s']:.0f} TFLOP/s{limit}; "
        f"{native}plain PyTorch {row['plain']:.1f}; error {row['error']:.4f}, plain PyTorch "
        f"{row['plain error']:.4f}"
    )


#: Columns of the table.
HEAD = ["case", "TFLOP/s", "floor", "ours", "ratio", "limit", "launched", "graph"]
HEAD += ["of it attention", "linears", "fused", "torch attention", "cudnn attention", "plain"]
HEAD += ["native", "error", "plain error", "native error", "ok"]


def print_table(rows: list[dict[str, Any]]) -> None:
    print("  ".join(f"{name:>15}" for name in HEAD))
    for row in rows:
        cells = [row.get(name) for name in HEAD]
        words = [
            f"{c:.4g}" if isinstance(c, float) else str(c if c is not None else "-") for c in cells
        ]
        print("  ".join(f"{word:>15}" for word in words))


if __name__ == "__main__":
    sys.exit(main())
