"""Tower and aligner beside native vLLM's, and on vLLM's layers over several ranks; prints JSON.

Run with a release on PYTHONPATH; argument: native vLLM's common/vision.py, loaded as a file.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import native_tower
import stages
import tiny_config
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT))

from vision_exp.config import VisionConfig  # noqa: E402
from vision_exp.model.encoder import encode_images  # noqa: E402
from vision_exp.tower import Aligner, VisionTower  # noqa: E402
from vision_exp.tower.parallel import VllmLinears  # noqa: E402

REAL = {
    "vision_dim": 1024,
    "vision_n_heads": 16,
    "vision_inter_dim": 2816,
    "hidden_size": 4096,
}
#: (layers, grid): multiples of three and not, a single row, a single column. The whole depth has
#: few rows, since a CPU without instructions for bfloat16 takes a second for each of them.
CASES = [(1, (7, 10)), (1, (9, 6)), (1, (1, 4)), (1, (5, 1)), (1, (14, 11)), (32, (2, 4))]


def randomise(*modules: torch.nn.Module) -> None:
    """Weights of the scale that keeps activations near 1, norm weights exact in bfloat16."""
    torch.manual_seed(0)
    with torch.no_grad():
        for module in modules:
            for name, parameter in module.named_parameters():
                if "norm" in name:
                    parameter.normal_(1.0, 0.1).copy_(parameter.bfloat16())
                else:
                    parameter.normal_(0.0, 0.02 if parameter.dim() == 1 else 1.0)
                    parameter.mul_(1.0 if parameter.dim() == 1 else parameter.shape[1] ** -0.5)


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def compare(native: ModuleType, layers: int, grids: list[tuple[int, int]]) -> list[dict[str, Any]]:
    hf = SimpleNamespace(**tiny_config.vision_config(**REAL, vision_n_layers=layers))
    config = VisionConfig.from_hf_config(hf)
    with torch.device("meta"):
        modules = (VisionTower(config), Aligner(config))
        theirs = (native.DeepseekV4ViT(hf), native.DeepseekV4Aligner(hf))
    for module in modules:
        module.to_empty(device="cpu")
    native_tower.on_cpu(*theirs)
    randomise(*modules)
    found = []
    for kind in ("float32", "bfloat16", "bfloat16, float32 norm weights"):
        dtype = getattr(torch, kind.split(",")[0])
        keep_norms = "norm" in kind
        for module in modules:
            for name, parameter in module.named_parameters():
                if "norm" not in name:
                    parameter.data = parameter.data.to(dtype)
                elif keep_norms:
                    parameter.data = parameter.data * 1.0013  # no longer exact in bfloat16
        for mine, its in zip(modules, theirs, strict=True):
            # Native vLLM casts norm weights too to the model's dtype; the reference keeps them.
            weights = {
                name: value if keep_norms and "norm" in name else value.to(dtype)
                for name, value in mine.state_dict().items()
            }
            its.load_state_dict(weights, assign=True)
        found += [
            {"layers": layers, "grid": grid, "kind": kind, **errors(native, modules, theirs, grid)}
            for grid in grids
        ]
    return found


def errors(native: ModuleType, modules: Any, theirs: Any, grid: tuple[int, int]) -> dict[str, Any]:
    """Relative error of each stage, both sides running from the patches on."""
    tower, aligner = modules
    vit, projector = theirs
    count = grid[0] * grid[1]
    patches = torch.rand(count, 3, 14, 14, generator=torch.Generator().manual_seed(count)) * 2 - 1
    patches = patches.to(tower.patch_embed.proj.weight.dtype)
    with stages.recorded(tower) as outputs:
        rows = tower(patches, grid)
    tables = native.get_vision_cos_sin(*grid, vit.rope_dim, vit.rope_theta)
    rope = tower.rope([grid], torch.device("cpu"))
    x = vit.patch_embed(patches)
    found = {"patch_embed": relative(outputs["patch_embed"], x)}
    for index, block in enumerate(vit.blocks):
        x = block(x, *tables)
        found[f"blocks.{index}"] = relative(outputs[f"blocks.{index}"], x)
    x = vit.norm(x)
    found["norm"] = relative(rows, x)
    found["aligner"] = relative(aligner(rows, grid), projector(x, *grid))
    pairs = zip(rope, tables, strict=True)
    same_angles = all(torch.equal(mine, table.squeeze(1)) for mine, table in pairs)
    return {"errors": found, "same_angles": same_angles, "norm_of_output": float(x.double().norm())}


def rank_main(rank: int, ranks: int, store: str, pipe: Any) -> None:
    """One rank: loads the whole weights through vLLM's loaders, runs, sends what it holds."""
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        init_distributed_environment(ranks, rank, f"file://{store}", rank, "gloo")
        initialize_model_parallel(ranks)
        overrides = {"vision_n_heads": 4, "vision_dim": 256, "hidden_size": 128}
        config = VisionConfig.from_hf_config(
            SimpleNamespace(**tiny_config.vision_config(**overrides))
        )
        plain = (VisionTower(config), Aligner(config))
        randomise(*plain)
        grids = [(5, 4), (5, 4), (3, 7)]
        patches = torch.rand(61, 3, 14, 14, generator=torch.Generator().manual_seed(1)) * 2 - 1
        expected = plain[0](patches, grids)
        expected = expected, plain[1](expected, grids)
        found: dict[str, Any] = {}
        for whole in (False, True):
            linears = VllmLinears.for_config(config, data_parallel=whole)
            shared = (VisionTower(config, linears), Aligner(config, linears))
            native_tower.on_cpu(*shared)
            for mine, full in zip(shared, plain, strict=True):
                weights = full.state_dict()
                for name, parameter in mine.named_parameters():
                    load = getattr(parameter, "weight_loader", lambda p, w: p.data.copy_(w))
                    load(parameter, weights[name])
            rows = shared[0](patches, grids)
            encoded = torch.cat(encoded_by_ranks(shared, whole, patches, grids))
            found["whole" if whole else "shared"] = {
                "tower": relative(rows, expected[0]),
                "aligner": relative(shared[1](rows, grids), expected[1]),
                "encoded": relative(encoded, expected[1]),
                "graphs": not shared[0].blocks[0].sharded,
                "names": set(shared[0].state_dict()) == set(plain[0].state_dict()),
                "wqkv": list(shared[0].blocks[0].attn.wqkv.weight.shape),
                "w1": list(shared[0].blocks[0].mlp.w1.weight.shape),
                "parameters": sum(p.numel() for p in shared[0].parameters()),
            }
        one_head = dataclasses.replace(config, n_heads=1)
        linears = VllmLinears.for_config(one_head, data_parallel=False)
        found["ranks sharing one head"] = linears.tp_size
        pipe.send(found)


def encoded_by_ranks(
    modules: tuple[VisionTower, Aligner], whole: bool, patches: torch.Tensor, grids: Any
) -> list[torch.Tensor]:
    """Rows of each image as the model asks for them: by heads, or images shared out."""
    names = ("vision", "aligner", "image_start", "config")
    config = SimpleNamespace(hidden_size=128)
    model = SimpleNamespace(**dict(zip(names, (*modules, torch.zeros(128), config), strict=True)))
    cells = torch.tensor([[-(-height // 3), -(-width // 3)] for height, width in grids])
    return encode_images(
        model,
        data_parallel=whole,
        patches=patches,
        vit_grid=torch.tensor(grids),
        llm_grid=cells,
        perm=torch.cat([torch.arange(int(count)) for count in cells.prod(1)]),
    )


def several_ranks(count: int) -> list[dict[str, Any]]:
    """Forked before this process has a group of its own, so that vLLM is imported once."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VLLM_DIST_IDENT"] = Path(folder).name  # names the ranks' shared memory
        pipes, ranks = [], []
        for rank in range(count):
            ours, theirs = context.Pipe()
            job = context.Process(target=rank_main, args=(rank, count, f"{folder}/store", theirs))
            job.start()
            theirs.close()
            pipes.append(ours)
            ranks.append(job)
        try:
            return [pipe.recv() for pipe in pipes]
        finally:
            for job in ranks:
                job.join(60)
                job.kill()


def main() -> None:
    # Of three images, each of four ranks but one gets one.
    shared = {str(count): several_ranks(count) for count in (1, 2, 4)}
    native = native_tower.load(sys.argv[1])
    compared = []
    with native_tower.one_rank(), torch.inference_mode():
        for layers in sorted({layers for layers, _ in CASES}):
            grids = [grid for number, grid in CASES if number == layers]
            compared += compare(native, layers, grids)
    print("RESULT " + json.dumps({"compared": compared, "ranks": shared}))


if __name__ == "__main__":
    main()
