"""Compiles in parallel the kernels that the checks will need, into the caches that vLLM reads.

    warm_kernels.py [--jobs 14] [--only KIND,...]

vLLM compiles them one after another at first use, nine minutes in all. What is missed here is only
compiled later. The hyper-connection kernels depend on the token count through the number of K
splits alone (groups of 64 tokens) and on the epsilon; FP8 products through the tile chosen for M,
and DeepGEMM keeps those per folder of its headers: once for every tree.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

HIDDEN, STREAMS, MIX = 4096, 4, 24
#: One count per number of splits that the checks meet.
COUNTS = [
    1,
    8,
    17,
    129,
    193,
    257,
    321,
    385,
    449,
    513,
    577,
    641,
    705,
    769,
    833,
    897,
    1025,
    1153,
    1409,
]
COUNTS += [1665, 2048]
#: Counts of the run that keeps the checkpoint's epsilon.
KEPT_COUNTS = [1, 217, 300, 630, 2048]
#: (rows, columns) of the block-FP8 linear layers, draft included.
SHAPES = [(1536, 4096), (32768, 1024), (8192, 1024), (4096, 8192), (4096, 4096), (4096, 2048)]
SHAPES += [(4096, 12288)]
MS = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 1280, 2048]


def job_names() -> list[str]:
    """Slowest first."""
    names = [f"mhc:{count}:1e-06" for count in COUNTS]
    names += [f"mhc:{count}:1e-20" for count in KEPT_COUNTS]
    names += [f"fp8:{rows}:{columns}" for rows, columns in SHAPES]
    return ["flashinfer", *names, "einsum"]


def run_job(name: str) -> None:
    import torch

    torch.cuda.set_device(0)
    torch.manual_seed(0)
    kind, *arguments = name.split(":")
    if kind == "mhc":
        warm_hyper(int(arguments[0]), float(arguments[1]))
    elif kind == "fp8":
        warm_linear(int(arguments[0]), int(arguments[1]))
    elif kind == "flashinfer":
        warm_flashinfer()
    else:
        warm_einsum()
    torch.cuda.synchronize()


def warm_flashinfer() -> None:
    """The FP8 product for few rows: one file that takes two minutes to compile."""
    from flashinfer.jit.gemm import gen_fp8_blockscale_gemm_sm90_module

    gen_fp8_blockscale_gemm_sm90_module().build_and_load()


def warm_hyper(tokens: int, eps: float) -> None:
    import torch
    from vllm.model_executor.kernels.mhc import tilelang as mhc

    def real(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda")

    fn, base, scale = real(MIX, STREAMS * HIDDEN) / 128, real(MIX), real(3)
    norm = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    x = real(tokens, HIDDEN).bfloat16()
    common = (fn, scale, base, eps, 1e-6, 1e-6, 2.0, 20)
    norms = {"norm_weight": norm, "norm_eps": eps}
    residual = x[:, None].repeat(1, STREAMS, 1)
    if hasattr(mhc, "mhc_pre_broadcast_tilelang"):  # since 0.26
        broadcast = fn.view(-1, STREAMS, HIDDEN).sum(dim=1)
        mhc.mhc_pre_broadcast_tilelang(x, *common, **norms, fn_broadcast=broadcast)
    post, mix, _ = mhc.mhc_pre_tilelang(residual, *common, **norms)
    mhc.mhc_fused_post_pre_tilelang(x, residual, post, mix, *common, n_splits=1, tile_n=1, **norms)
    last = mhc.mhc_post_tilelang(x, residual, post, mix)
    head = real(STREAMS, STREAMS * HIDDEN) / 128
    mhc.hc_head_fused_kernel_tilelang(last, head, real(1), real(STREAMS), eps, 1e-6)


def _weight(rows: int, columns: int, **bmm: int) -> tuple:
    import torch
    from vllm.model_executor.layers.quantization.utils.fp8_utils import (
        deepgemm_post_process_fp8_weight_block,
    )
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    weight = torch.randn(rows, columns, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.full((rows // 128, columns // 128), 2.0**-6, device="cuda")
    return deepgemm_post_process_fp8_weight_block(
        wq=weight,
        ws=scale.to(torch.float8_e8m0fnu),
        quant_block_shape=(128, 128),
        use_e8m0=is_deep_gemm_e8m0_used(),
        is_bmm=bool(bmm),
        bmm_batch_size=bmm.get("groups", 0),
    )


def warm_linear(rows: int, columns: int) -> None:
    import torch
    from vllm.utils.deep_gemm import fp8_gemm_nt, is_deep_gemm_e8m0_used

    weight = _weight(rows, columns)
    for m in MS:
        x = torch.randn(m, columns, device="cuda").to(torch.float8_e4m3fn)
        scale = torch.ones(m, columns // 128, device="cuda")
        out = torch.empty(m, rows, device="cuda", dtype=torch.bfloat16)
        fp8_gemm_nt((x, scale), weight, out, is_deep_gemm_e8m0_used=is_deep_gemm_e8m0_used())


def warm_einsum() -> None:
    """The grouped output projection: 8 groups of 4096 to 1024."""
    import torch
    from vllm.models.deepseek_v4.nvidia.ops.o_proj import compute_fp8_einsum_recipe
    from vllm.utils.deep_gemm import fp8_einsum

    recipe, _ = compute_fp8_einsum_recipe()
    weight = _weight(8 * 1024, 4096, groups=8)
    for m in MS:
        x = torch.randn(m, 8, 4096, device="cuda").to(torch.float8_e4m3fn)
        scale = torch.ones(m, 8, 32, device="cuda")
        out = torch.empty(m, 8, 1024, device="cuda", dtype=torch.bfloat16)
        fp8_einsum("bhr,hdr->bhd", (x, scale), weight, out, recipe=recipe)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--only", default="", help="kinds of jobs: mhc, fp8, einsum, flashinfer")
    parser.add_argument("--job")
    args = parser.parse_args()
    if args.job:
        run_job(args.job)
        return 0
    started = time.monotonic()
    kinds = set(filter(None, args.only.split(",")))
    names = [name for name in job_names() if not kinds or name.partition(":")[0] in kinds]
    waiting, running, failed = list(names), {}, []
    while waiting or running:
        while waiting and len(running) < args.jobs:
            name = waiting.pop(0)
            command = [sys.executable, __file__, "--job", name]
            running[name] = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        for name, process in list(running.items()):
            if process.poll() is None:
                continue
            words = process.communicate()[0]
            if process.returncode:
                failed.append(name)
                print(f"[warm] {name} failed: {words[-600:]}", flush=True)
            del running[name]
        time.sleep(0.2)
    seconds = time.monotonic() - started
    print(f"[warm] {len(names) - len(failed)} jobs, {len(failed)} failed, {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
