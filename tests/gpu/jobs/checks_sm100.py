"""SM100's second pass over image rows, with the real FlashMLA kernel, which SM90 has as well.

    visibility_sm100_pass.py REPORT.json

No engine: one made-up layer of each kind over caches in FlashInfer's plain layout, BF16 and FP8.
The first pass, FlashInfer's own kernel, does not exist on SM90 and is left out.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu.lib.rig import Report

from vision_exp.engine.spans import ImageSpan
from vision_exp.visibility import flashinfer
from vision_exp.visibility.spans import ImageVisibility, RowSpan, look_distances

WINDOW, IMAGE, BLOCK, DIM, HEADS, TOPK = 128, 384, 64, 512, 64, 512
STOP, START, END = 1200, 803, 1170
LIMIT = 2e-2


def main(report_path: str) -> int:
    report = Report(Path(report_path))
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        for ratio in (1, 4, 128):
            for heads in (HEADS, 16):
                name = f"sm100 pass, {dtype}, ratio {ratio}, {heads} heads"
                report.run(name, lambda d=dtype, r=ratio, h=heads: check(d, r, h))
    return 0 if all(row.ok for row in report.rows) else 1


def check(dtype: torch.dtype, ratio: int, heads: int) -> tuple[bool, str]:
    rows = STOP  # the whole prompt in one step
    query = (torch.randn(rows, heads, DIM, device="cuda") / 4).to(dtype)
    keys = (torch.randn(STOP, DIM, device="cuda") / 4).to(dtype)
    cache, table = paged(keys, BLOCK)
    size, count = 256 // ratio, STOP // ratio
    compressed = (torch.randn(count, DIM, device="cuda") / 4).to(dtype)
    compressed_cache, compressed_table = paged(compressed, size)
    position = torch.arange(rows, device="cuda")
    used = ((position + 1) // ratio).clamp(max=TOPK) if ratio > 1 else torch.zeros_like(position)
    chosen = torch.full((rows, TOPK), -1, dtype=torch.int32, device="cuda")
    if ratio > 1:
        for row in range(START, END + 1):
            picked = torch.randperm((row + 1) // ratio, device="cuda")[: int(used[row])]
            chosen[row, : len(picked)] = picked.int()
    sink = torch.randn(heads, device="cuda")
    layer = SimpleNamespace(
        compress_ratio=ratio, topk_indices_buffer=chosen, attn_sink=sink, scale=DIM**-0.5
    )
    span = RowSpan(request=0, row=START, image=ImageSpan(START, END + 1))
    lookback, lookahead = torch.from_numpy(look_distances([span], rows)).cuda()
    image_rows = torch.arange(START, END + 1, device="cuda")
    swa = SimpleNamespace(num_decodes=0, num_decode_tokens=0, block_table=table, block_size=BLOCK)
    visibility = ImageVisibility(lookback, lookahead, image_rows, (span,), WINDOW, IMAGE)
    info = SimpleNamespace(
        block_table=compressed_table, block_size=256, c128a_prefill_topk_indices=chosen
    )
    output = torch.zeros(rows, heads, DIM, dtype=torch.bfloat16, device="cuda")
    flashinfer.attend_sm100(
        layer,
        visibility,
        q=query,
        kv_cache=compressed_cache if ratio > 1 else None,
        swa_k_cache=cache,
        swa_metadata=swa,
        attn_metadata=info,
        swa_only=ratio == 1,
        output=output,
    )
    want = reference(query, keys, compressed, chosen, used, sink, layer.scale, ratio)
    got = output[START : END + 1].float()
    error = float(((got - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)).max())
    others = float(output[:START].abs().max()) + float(output[END + 1 :].abs().max())
    return error < LIMIT and others == 0, f"relative error {error:.3g}; other rows {others:.3g}"


def paged(values: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in random cache blocks: (blocks, size, 512), and the one request's block table."""
    blocks = -(-len(values) // size)
    table = torch.randperm(blocks, device="cuda").int() + 1
    cache = torch.zeros(blocks + 1, size, DIM, dtype=values.dtype, device="cuda")
    for index in range(blocks):
        part = values[index * size : (index + 1) * size]
        cache[table[index], : len(part)] = part
    return cache, table[None]


def reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    compressed: torch.Tensor,
    chosen: torch.Tensor,
    used: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    ratio: int,
) -> torch.Tensor:
    """Masked attention in float32, row by row of the image."""
    out = []
    for row in range(START, END + 1):
        first = max(min(row - WINDOW + 1, START), 0)
        seen = keys[first : END + 1].float()
        if ratio > 1:
            seen = torch.cat([seen, compressed[chosen[row, : used[row]].long()].float()])
        scores = query[row].float() @ seen.T * scale
        weight = torch.cat([scores, sink[:, None]], dim=1).softmax(dim=1)[:, :-1]
        out.append(weight @ seen)
    return torch.stack(out)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
