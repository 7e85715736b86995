"""Runs the fused blocks in Triton's interpreter on the CPU against tower.py; prints JSON.

In float32: the interpreter cuts bfloat16 off instead of rounding it.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch

sys.path.append(str(Path(__file__).resolve().parents[3] / "support"))

import quick_interpreter

from vision_exp.config import VisionConfig
from vision_exp.tower import VisionTower, attention, fused, graphs, rocm, split_kv
from vision_exp.tower.backends import Backend

GRIDS = [(3, 5), (3, 5), (7, 2)]


def by_keys(cu_seqlens_k: torch.Tensor) -> attention.Attend:
    """Attention of one image whose length comes from a tensor, as FlashAttention takes it."""

    def attend(qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.permute(1, 2, 0, 3).unbind(0)  # (heads, n, d)
        count = int(cu_seqlens_k[1])
        out = torch.nn.functional.scaled_dot_product_attention(q, k[:, :count], v[:, :count])
        return out.transpose(0, 1).flatten(1)

    return attend


def trusting(cu_seqlens_k: torch.Tensor) -> attention.Attend:
    """As FlashAttention 2: it reads as many rows as it is told of, also behind the last one."""
    attend = by_keys(cu_seqlens_k)

    def checked(qkv: torch.Tensor) -> torch.Tensor:
        assert int(cu_seqlens_k[1]) <= len(qkv), "keys behind the rows of a bucket"
        return attend(qkv)

    return checked


#: What CUDA graphs run, and a stand-in that fails where FlashAttention 2 reads too far.
KINDS = {
    "torch": attention.TORCH.image,
    "triton": partial(split_kv.image, split_kv.Tile(16, 32, 4, 2)),
    "trusting": lambda *_: trusting,
}


def bucket_error(tower: VisionTower, kind: str) -> float:
    """Images one after the other in a bucket that is too large, captured work repeated.

    The largest first: what it leaves behind must not reach the next ones.
    """
    rows = 40
    row = torch.empty(0, tower.config.dim)
    static = graphs.StaticBuffers(rows + 24, torch.empty(0, 3, 14, 14), row)  # of a larger bucket
    attend_image = KINDS[kind](rows, tower.config.n_heads, static.out.device)
    bucket = graphs.Bucket(tower, rows, static, attend_image, Backend(), repeat)
    assert bucket.attention is attend_image  # what a graph uses must live as long
    errors = []
    grids = ((4, 10), (3, 5), (7, 2), (3, 5))
    for grid in grids if kind == "trusting" else grids[:2]:
        patches = torch.randn(grid[0] * grid[1], 3, 14, 14)
        expected = tower(patches, grid)
        found = bucket.run(patches, grid[1])
        assert found.shape == expected.shape
        errors.append(float((found - expected).norm() / expected.norm()))
    return max(errors)


class SummedOverRanks(torch.nn.Module):
    """A layer of which this rank holds half of the inputs, while its result is the whole one."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.whole, self.bias = [layer], layer.bias
        self.weight = torch.nn.Parameter(layer.weight[:, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole[0](x)


def tail_error() -> float:
    """The last rows of one image, by one program for each tile and by several.

    Rows behind the last key, as a bucket has them, change nothing; nor do keys that a bucket is
    told of and does not have. What has been attended to before is left alone. And all rows of
    packed images, by the same kernel.
    """
    errors = []
    for rows, length, start in ((300, 287, 130), (200, 900, 140), (90, 3, 1)):
        for num_splits in (1, 2, 7):
            qkv, cu_seqlens_k = torch.randn(rows, 3, 4, 16), torch.tensor([0, length])
            expected = by_keys(cu_seqlens_k)(qkv).unflatten(1, (4, 16))
            expected[:start] = 7.0
            tail = split_kv.TailRows(start, rows, 4, num_splits, qkv.device)
            for _ in range(2):  # counts from zero again
                out = torch.full_like(expected, 7.0)
                tail(qkv, cu_seqlens_k, out)
                errors.append(float((out - expected).norm() / expected.norm()))
    qkv, seqlens = torch.randn(61, 3, 4, 16), [20, 1, 40]
    expected = attention.torch_packed(qkv, seqlens)
    out = split_kv.packed(split_kv.Tile(16, 32, 4, 2), qkv, seqlens)
    errors.append(float((out - expected).norm() / expected.norm()))
    return max(errors)


def repeat(work: Callable[[], None]) -> Callable[[], None]:
    """In place of a capture."""
    work()
    return work


def forgetful(work: Callable[[], None]) -> Callable[[], None]:
    """A capture whose replay does nothing, so that what lay there stays."""
    work()
    return lambda: None


def impossible(work: Callable[[], None]) -> Callable[[], None]:
    work()
    raise RuntimeError("operation not permitted when stream is capturing")


def captures(tower: VisionTower) -> dict[str, dict[str, object]]:
    """Two graphs of the tower, by captures that work and that do not; and a kernel that raises."""

    def broken(*_: object) -> attention.ImageAttention:
        raise TypeError("no such keyword")

    odd = replace(attention.TORCH, image=broken)
    found: dict[str, dict[str, object]] = {}
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    graphs.logger.addHandler(handler)
    graphs.logger.setLevel(logging.INFO)
    for name, capture, kind, sizes in (
        ("works", repeat, attention.TORCH, (11, 20)),
        ("forgets", forgetful, attention.TORCH, (11,)),
        ("fails", impossible, attention.TORCH, (11,)),
        ("raises", repeat, odd, (11,)),
    ):
        like = torch.empty(1, 3, 14, 14)
        made = graphs.capture_all(tower, like, Backend(kind), capture, sizes)
        found[name] = {"rows": made and [bucket.rows for bucket in made], "log": lines.copy()}
        lines.clear()
    return found


def on_rocm(tower: VisionTower) -> dict[str, list[object]]:
    """Whether fused blocks count as running on ROCm, and what the log says of it: as they are, with
    a compiler that raises, and with rows that are wrong."""

    def no_compiler(*_: object) -> torch.Tensor:
        raise RuntimeError("PassManager::run failed\nat line 3")

    found: dict[str, list[object]] = {}
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    rocm.logger.addHandler(handler)
    patches = torch.empty(1, 3, 14, 14)
    for name, norm in (
        ("works", fused.add_norm),
        ("raises", no_compiler),
        ("wrong", lambda x, *_: torch.ones_like(x)),
    ):
        lines.clear()
        with (
            mock.patch.object(torch.version, "hip", "7.0"),
            mock.patch.object(fused, "add_norm", norm),
        ):
            answers = [rocm.fused_runs(tower, patches) for _ in range(2)]
        found[name] = [answers, lines.copy()]
        del tower._fused_runs
    found["elsewhere"] = [[rocm.fused_runs(tower, patches)], []]
    return found


def main() -> None:
    quick_interpreter.install()
    torch.manual_seed(0)
    config = VisionConfig(
        n_layers=2,
        dim=128,
        n_heads=2,
        inter_dim=192,
        patch_size=14,
        rope_theta=10000.0,
        downsample_ratio=3,
        max_n_token=384,
        min_pixels=147456,
        max_wh_ratio=8,
        hidden_size=128,
    )
    tower = VisionTower(config)
    for parameter in tower.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    count = sum(height * width for height, width in GRIDS)
    patches = torch.randn(count, 3, 14, 14)
    seqlens = [height * width for height, width in GRIDS]
    with torch.inference_mode():
        x = tower.patch_embed(patches)
        expected = tower(patches, GRIDS)

        def fused_error() -> float:
            rope = tower.rope(GRIDS, patches.device)
            backend = Backend()
            attend = backend.attention.packed
            found = fused.run_blocks(
                tower, x.clone(), rope, lambda qkv: attend(qkv, seqlens), backend
            )
            return float((found - expected).norm() / expected.norm())

        error = fused_error()
        gate_up = torch.randn(9, 6)
        gate, up = gate_up.chunk(2, dim=-1)
        swiglu = fused.swiglu(gate_up) - torch.nn.functional.silu(gate) * up
        in_buckets = {kind: bucket_error(tower, kind) for kind in KINDS}
        captured = captures(tower)
        tail = tail_error()
        rocm_runs = on_rocm(tower)
        for block in tower.blocks:
            block.sharded = True
            block.attn.wo = SummedOverRanks(block.attn.wo)
            block.mlp.w2 = SummedOverRanks(block.mlp.w2)
        shared = fused_error()
    print(
        json.dumps(
            {
                "error": error,
                "shared": shared,
                "swiglu": float(swiglu.abs().max()),
                "buckets": in_buckets,
                "captures": captured,
                "tail": tail,
                "rocm": rocm_runs,
            }
        )
    )


if __name__ == "__main__":
    main()
