"""Compares the Triton kernel with the reference on Triton's interpreter (TRITON_INTERPRET=1).

kernel_child.py NATIVE: a dsv4_topk.py of a vLLM that serves the model itself, run as an oracle.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import types
from pathlib import Path

import torch
import triton
import triton.language

sys.path.append(str(Path(__file__).resolve().parents[3] / "support"))

import quick_interpreter

from vision_exp.layout import PLACEHOLDER_ID, SENTINEL_FIRST, SENTINEL_LAST, image_token_mask
from vision_exp.routing.kernel import Launch, launch
from vision_exp.routing.reference import mm_topk_reference


def case(rows: int, experts: int, top_k: int, dtype: torch.dtype, ids: torch.dtype, hashed: bool):
    logits = (torch.randn(rows, experts) * 4).to(dtype)
    logits[0] = float("nan")
    logits[1] = 0.5  # all tied
    logits[2, :9] = float("inf")
    logits[3] = float("-inf")
    logits[4, 7] = float("nan")  # in a row that is whole otherwise
    table = tokens = None
    if hashed:
        table = torch.stack([torch.randperm(experts)[:top_k] for _ in range(50)]).to(ids)
        tokens = torch.randint(-3, 53, (rows,)).to(ids)
        tokens[2], tokens[5] = 52, -3  # text rows, whose tokens lie beyond the table's ends
    # Coarse biases, so that equal biased scores are equal in every precision.
    # Those of images are low enough that all scores of the tied row are negative.
    bias, bias_vl = (torch.randint(*ends, (experts,)) / 4.0 for ends in ((-8, 8), (-16, -4)))
    mask = torch.rand(rows) < 0.5
    mask[:5] = torch.tensor([True, True, False, True, True])
    mask[5:6] = False
    return (logits, None if hashed else bias, bias_vl, mask), {
        "top_k": top_k,
        "scale": 1.5,
        "tid2eid": table,
        "token_ids": tokens,
    }


def native(path: str):
    """vLLM's kernel out of its one file, with stand-ins for what that imports."""
    platform = types.SimpleNamespace(is_cuda=lambda: True, is_arch_support_pdl=lambda: False)
    parts = {
        "vllm": {},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"tl": triton.language, "triton": triton},
    }
    for name, names in parts.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(names)
    spec = importlib.util.spec_from_file_location("native_dsv4_topk", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.dsv4_topk


def compare_with_native(path: str) -> int:
    """Mixed batches, with ids on both sides of the sentinels; returns the number of rows."""
    dsv4_topk = native(path)
    edges = [SENTINEL_FIRST - 1, *range(SENTINEL_FIRST, SENTINEL_LAST + 2), PLACEHOLDER_ID, 5]
    tokens = torch.tensor(edges * 2, dtype=torch.int32)
    rows = len(tokens)
    for experts in (256, 384):
        logits = torch.randn(rows, experts) * 3
        bias, bias_vl = torch.randn(2, experts)
        wanted = dsv4_topk(logits, bias, torch.int32, 1.5, tokens, bias_vl, SENTINEL_FIRST)
        mask = image_token_mask(tokens)
        keywords = {"top_k": 6, "scale": 1.5, "tid2eid": None, "token_ids": None}
        found = launch(logits, bias, bias_vl, mask, **keywords)
        if not torch.equal(found[1], wanted[1]):
            raise SystemExit(f"{experts}\n{found[1]}\n{wanted[1]}")
        torch.testing.assert_close(found[0], wanted[0], atol=1e-6, rtol=1e-5)
    return 2 * rows


def main() -> None:
    quick_interpreter.install()
    torch.manual_seed(0)
    checked = 0
    types = itertools.cycle([(torch.float32, torch.int32), (torch.bfloat16, torch.int64)])
    for experts, top_k, hashed in itertools.product((256, 384), (1, 6, 8), (False, True)):
        dtype, ids_dtype = next(types)
        for rows, plan in ((7, Launch()), (6, Launch(rows=4))):
            arguments, keywords = case(rows, experts, top_k, dtype, ids_dtype, hashed)
            found = launch(*arguments, **keywords, ids_dtype=ids_dtype, plan=plan)
            wanted = mm_topk_reference(*arguments, **keywords)
            assert found[1].dtype == ids_dtype
            if not torch.equal(found[1].long(), wanted[1]):
                raise SystemExit(f"{experts} {top_k} {dtype} {hashed}\n{found[1]}\n{wanted[1]}")
            torch.testing.assert_close(found[0], wanted[0], atol=1e-6, rtol=1e-5, equal_nan=True)
            checked += rows
    # Rows, columns and marks that do not lie side by side in memory.
    arguments, keywords = case(5, 256, 6, torch.float32, torch.int32, False)
    wide = torch.cat((arguments[0], torch.zeros(5, 64)), 1)[:, :256]
    wanted = mm_topk_reference(*arguments, **keywords)
    assert torch.equal(launch(wide, *arguments[1:], **keywords)[1].long(), wanted[1])
    apart, mask = arguments[0].t().contiguous().t(), arguments[3]
    marks = torch.stack((mask, ~mask, ~mask), 1)[:, 0]
    found = launch(apart, *arguments[1:3], marks, **keywords)
    assert torch.equal(found[1].long(), wanted[1])
    checked += compare_with_native(sys.argv[1])
    print(f"rows checked: {checked}")


if __name__ == "__main__":
    main()
