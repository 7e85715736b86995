"""Compiles every Triton kernel of the overlay for AMD GPUs, ahead of time and without one.

    python bench/amd_kernels.py [--quick] [TARGET ...]      exit 1 if a kernel does not compile

Targets: gfx942 (MI300X, waves of 64) and gfx1151 (Strix Halo, waves of 32) unless named. `--quick`
compiles one variant of each kernel. A kernel that compiles was not run: not run on AMD hardware.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import triton
import triton.language

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

WAVES = {"gfx942": 64, "gfx1151": 32}
#: Shared memory that a program may take there, in bytes.
LOCAL_MEMORY = 64 * 1024


@dataclass(frozen=True)
class Variant:
    """One kernel as it is launched: types of its arguments by name, constants, and options."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int] = field(default_factory=dict)


def variants(quick: bool) -> Iterator[Variant]:
    """What the overlay launches, in the sizes of the published checkpoint."""
    from vision_exp.routing import kernel as routing
    from vision_exp.tower import fused, split_kv

    with mock.patch.dict(sys.modules, {"vllm.triton_utils": _triton_utils()}):
        from vision_exp.visibility import flashmla
    bf16, f32, i32, i1 = "*bf16", "*fp32", "*i32", "*i1"
    for hashed in (False, True)[: 1 if quick else 2]:
        types = dict.fromkeys(("logits_ptr", "bias_ptr", "bias_vl_ptr", "weights_ptr"), f32)
        types |= {"mask_ptr": i1, "ids_ptr": i32, "scale": "fp32"}
        types |= dict.fromkeys(("table_ptr", "tokens_ptr"), i32 if hashed else i1)
        for experts, rows in ((256, 1), (384, 2))[: 1 if quick else 2]:
            constants = {"EXPERTS": experts, "BLOCK": 1 << (experts - 1).bit_length()}
            constants |= {"ROWS": rows, "TOP_K": 6, "HASH": hashed, "PDL": False}
            name = f"experts, {experts}{' by hash' if hashed else ''}"
            yield Variant(name, routing._mm_topk_kernel, types, constants, {"num_warps": 1})
    types = {"x_ptr": bf16, "other_ptr": bf16, "weight_ptr": bf16, "out_ptr": bf16, "eps": "fp32"}
    constants = {"WIDTH": 1024, "ADD": True, "PDL": False}
    yield Variant("tower: sum and norm", fused._add_norm_kernel, types, constants, {"num_warps": 4})
    types = {"qkv_ptr": bf16, "cos_ptr": f32, "sin_ptr": f32}
    constants = {"STRIDE": 3072, "HEADS": 16, "HALF": 32, "SIZE": 32, "PDL": False}
    yield Variant("tower: rotary", fused._apply_rotary_kernel, types, constants, {"num_warps": 4})
    types = {"x_ptr": bf16, "out_ptr": bf16}
    constants = {"WIDTH": 2816, "SIZE": 1024}
    yield Variant("tower: SwiGLU", fused._swiglu_kernel, types, constants, {"num_warps": 4})
    types = {"axis_ptr": f32, "width_ptr": i32, "out_ptr": f32}
    constants = {"SIZE": 16, "ROWS": 32}
    yield Variant("tower: positions", fused._expand_rope_table_kernel, types, constants)
    types = dict.fromkeys(("qkv_ptr", "out_ptr"), bf16)
    types |= {"cu_seqlens_k_ptr": i32, "acc_ptr": f32, "ml_ptr": f32, "semaphore_ptr": i32}
    types["qk_scale"] = "fp32"
    for tile in split_kv.WHOLE[: 1 if quick else 2]:
        constants = {"HEADS": 16, "DIM": 64, "BLOCK_M": tile.rows, "BLOCK_N": tile.keys}
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        name = f"tower: attention {tile.rows}x{tile.keys}"
        yield Variant(name, split_kv._tail_rows_kernel, types, constants, options)
    for ratio, topk in ((1, 0), (4, 512), (128, 1024))[1 if quick else 0 : 2 if quick else 3]:
        constants = {"COMPRESS_RATIO": ratio, "TOPK": topk, "TOPK_BLOCK": max(topk, 1)}
        constants |= {"WINDOW": 128, "WINDOW_BLOCK": 512}
        pointers = [n for n in flashmla._combine_kernel.arg_names if n.endswith("_ptr")]
        types = dict.fromkeys(pointers, i32)
        name = f"visibility, ratio {ratio}"
        yield Variant(name, flashmla._combine_kernel, types, constants)


def _triton_utils() -> ModuleType:
    """vLLM's module of this name hands Triton on, on a machine with a GPU only."""
    module = ModuleType("vllm.triton_utils")
    module.__dict__.update(triton=triton, tl=triton.language)
    return module


def compiled(variant: Variant, target: str) -> tuple[int, int]:
    """Bytes of machine code and of shared memory. Raises what Triton's compiler raises."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.kernel.arg_names
    types = {name: variant.types.get(name, "i32") for name in names}
    types |= dict.fromkeys(variant.constants, "constexpr")
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    source = ASTSource(fn=variant.kernel, signature=types, constexprs=constants)
    made = triton.compile(
        source, target=GPUTarget("hip", target, WAVES[target]), options=dict(variant.options)
    )
    return len(made.asm["hsaco"]), made.metadata.shared


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    if set(options.targets) - set(WAVES):
        parser.error(f"targets are {', '.join(WAVES)}")
    failed = 0
    with tempfile.TemporaryDirectory() as cache:
        triton.knobs.cache.dir = cache
        for target in options.targets or WAVES:
            for variant in variants(options.quick):
                try:
                    code, shared = compiled(variant, target)
                    fits = shared <= LOCAL_MEMORY
                    said = f"compiles, {code} bytes, {shared} bytes of shared memory"
                    said += "" if fits else f", more than {LOCAL_MEMORY}: left out at start"
                except Exception as error:  # noqa: BLE001  a compiler raises what it likes
                    failed += 1
                    said = f"DOES NOT COMPILE: {type(error).__name__}: {str(error)[:200]}"
                print(f"{target:<8} {variant.name:<26} {said}", flush=True)
    print(f"Triton {triton.__version__}; compiled only, not run on AMD hardware")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
