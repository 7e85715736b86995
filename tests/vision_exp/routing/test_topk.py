"""Expert selection: the reference against float64, and the kernel on the Triton interpreter."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sources
import torch

from anchors.releases import wheels
from vision_exp.routing.reference import mm_topk_reference
from vision_exp.routing.topk import mm_topk

ROOT = Path(__file__).resolve().parents[3]
SCALE = 1.5


def oracle(logits, bias, bias_vl, image, top_k, table=None, tokens=None):
    """The published rule for one batch in Python floats: lists of (ids, weights) by row."""
    rows = []
    for row, line in enumerate(logits.tolist()):
        scores = [math.sqrt(max(x, 0.0) + math.log1p(math.exp(-abs(x)))) for x in line]
        if table is not None and not image[row]:
            ids = table[int(tokens[row])].tolist()
        else:
            shift = bias_vl if image[row] else bias
            biased = [score + float(shift[at]) for at, score in enumerate(scores)]
            ids = sorted(range(len(line)), key=lambda at: (-biased[at], at))[:top_k]
        total = sum(scores[at] for at in ids)
        rows.append((ids, [scores[at] / total * SCALE if total > 0 else 0.0 for at in ids]))
    return rows


def batch(rows, experts, top_k, seed, dtype=torch.float32, hashed=False, ids=torch.int64):
    """Random arguments of mm_topk: (positional, keywords)."""
    torch.manual_seed(seed)
    logits = (torch.randn(rows, experts) * 4).to(dtype)
    bias, bias_vl = torch.randn(experts), torch.randn(experts)
    keywords = {"top_k": top_k, "scale": SCALE}
    if hashed:
        keywords["tid2eid"] = torch.stack([torch.randperm(experts)[:top_k] for _ in range(97)])
        keywords["tid2eid"] = keywords["tid2eid"].to(ids)
        keywords["token_ids"] = torch.randint(0, 97, (rows,)).to(ids)
    mask = torch.rand(rows) < 0.4
    return (logits, None if hashed else bias, bias_vl, mask), keywords


CASES = [
    (experts, top_k, dtype, hashed)
    for experts in (256, 384)
    for top_k in (1, 6, 8)
    for dtype in (torch.float32, torch.bfloat16)
    for hashed in (False, True)
]


@pytest.mark.parametrize("experts, top_k, dtype, hashed", CASES)
def test_selection_in_float64_is_the_published_rule(experts, top_k, dtype, hashed):
    (logits, bias, bias_vl, mask), keywords = batch(40, experts, top_k, 1, dtype, hashed)
    weights, ids = mm_topk_reference(logits, bias, bias_vl, mask, **keywords, dtype=torch.float64)
    wanted = oracle(
        logits.double(),
        bias,
        bias_vl,
        mask,
        top_k,
        keywords.get("tid2eid"),
        keywords.get("token_ids"),
    )
    assert ids.tolist() == [row[0] for row in wanted]
    torch.testing.assert_close(
        weights, torch.tensor([row[1] for row in wanted]), atol=1e-7, rtol=1e-6
    )


@pytest.mark.parametrize("experts, top_k, dtype, hashed", CASES)
def test_float32_selection_is_right_up_to_rounding(experts, top_k, dtype, hashed):
    """Against float64: the same experts, except where two biased scores are equal in float32."""
    for seed in range(20):
        arguments, keywords = batch(64, experts, top_k, seed, dtype, hashed)
        weights, ids = mm_topk(*arguments, **keywords)
        exact_weights, exact_ids = mm_topk_reference(*arguments, **keywords, dtype=torch.float64)
        logits, bias, bias_vl, mask = arguments
        scores = torch.nn.functional.softplus(logits.double()).sqrt()
        shift = torch.where(mask.unsqueeze(1), bias_vl, bias_vl if bias is None else bias)
        biased = scores + shift
        gap = (biased.gather(1, ids.long()) - biased.gather(1, exact_ids)).abs()
        text_hash = ~mask.unsqueeze(1) & torch.tensor(hashed)
        assert (torch.where(text_hash, 0.0, gap) < 1e-6).all()
        assert (ids.long() == exact_ids)[text_hash.expand_as(ids)].all()
        same = (ids.long() == exact_ids).all(1)
        assert same.float().mean() > 0.98
        torch.testing.assert_close(weights[same], exact_weights[same], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(weights.sum(1), torch.full((64,), SCALE), atol=1e-5, rtol=0)


@pytest.mark.parametrize("hashed", [False, True])
def test_each_kind_of_row_depends_on_its_own_inputs_only(hashed):
    (logits, bias, bias_vl, mask), keywords = batch(200, 256, 6, 3, hashed=hashed)
    before = mm_topk(logits, bias, bias_vl, mask, **keywords)[1]
    image = mm_topk(logits, bias, -bias_vl, mask, **keywords)[1]
    assert ((before != image).any(1) == mask).all()
    if hashed:
        keywords["tid2eid"] = (keywords["tid2eid"] + 1) % 256
    else:
        bias = -bias
    text = mm_topk(logits, bias, bias_vl, mask, **keywords)[1]
    assert ((before != text).any(1) == ~mask).all()


def test_ties_go_to_the_lower_expert():
    logits = torch.zeros(2, 256)
    logits[:, 200:203] = 2.0
    mask = torch.tensor([False, True])
    bias, bias_vl = torch.zeros(256), torch.zeros(256)
    bias_vl[[7, 9]] = 5.0
    weights, ids = mm_topk(logits, bias, bias_vl, mask, top_k=6, scale=SCALE)
    assert ids.tolist() == [[200, 201, 202, 0, 1, 2], [7, 9, 200, 201, 202, 0]]
    assert weights[1, 0] == weights[1, 1] == weights[1, 5]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3e38, -3e38])
def test_extreme_rows_stay_in_range(value):
    logits = torch.randn(4, 256)
    logits[0] = value
    logits[1, 250:] = value
    logits[2, 3] = value
    mask = torch.tensor([True, False, True, False])
    weights, ids = mm_topk(logits, torch.randn(256), torch.randn(256), mask, top_k=6, scale=SCALE)
    assert ids.min() >= 0
    assert ids.max() < 256
    assert all(len(set(row)) == 6 for row in ids.tolist())
    assert weights[3].isfinite().all()
    if math.isnan(value):
        assert 3 not in ids[2].tolist()
        assert ids[1].max() < 250


def test_a_row_without_any_score_gets_zero_weights():
    logits = torch.full((1, 256), float("-inf"))
    bias = torch.zeros(256)
    weights, ids = mm_topk(logits, bias, bias, torch.tensor([True]), top_k=6, scale=SCALE)
    assert weights.tolist() == [[0.0] * 6]
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5]]


def test_token_ids_outside_the_table_are_clamped():
    (logits, bias, bias_vl, _), keywords = batch(2, 256, 6, 0, hashed=True)
    keywords["token_ids"] = torch.tensor([-7, 10**6])
    mask = torch.zeros(2, dtype=torch.bool)
    _, ids = mm_topk(logits, bias, bias_vl, mask, **keywords)
    table = keywords["tid2eid"]
    assert ids.tolist() == [table[0].tolist(), table[-1].tolist()]


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_small_batches_and_id_types(rows, dtype):
    arguments, keywords = batch(rows, 384, 6, 0)
    weights, ids = mm_topk(*arguments, **keywords, ids_dtype=dtype)
    assert (weights.dtype, ids.dtype) == (torch.float32, dtype)
    assert weights.shape == ids.shape == (rows, 6)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"logits": torch.zeros(4, 256, dtype=torch.float16)}, "float32 or bfloat16"),
        ({"logits": torch.zeros(256)}, "2-D"),
        ({"top_k": 9}, "top_k"),
        ({"bias_vl": torch.zeros(256, dtype=torch.float64)}, "bias_vl"),
        ({"bias": torch.zeros(255)}, "text rows need"),
        ({"bias": None}, "text rows need"),
        ({"bias_vl": torch.zeros(255)}, "bias_vl"),
        ({"image_mask": torch.zeros(4, dtype=torch.int32)}, "image_mask"),
        ({"image_mask": torch.zeros(3, dtype=torch.bool)}, "image_mask"),
        ({"tid2eid": torch.zeros(9, 5, dtype=torch.int32)}, "tid2eid"),
        ({"tid2eid": torch.zeros(9, 6, dtype=torch.int32)}, "token_ids"),
        ({"ids_dtype": torch.int16}, "ids_dtype"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    arguments = {
        "logits": torch.zeros(4, 256),
        "bias": torch.zeros(256),
        "bias_vl": torch.zeros(256),
        "image_mask": torch.zeros(4, dtype=torch.bool),
        "top_k": 6,
        "scale": SCALE,
    }
    with pytest.raises(ValueError, match=message):
        mm_topk(**{**arguments, **change})


def test_the_mask_is_required():
    """A caller that forgets the images must fail, not route them as text."""
    arguments, keywords = batch(3, 256, 6, 0)
    with pytest.raises(TypeError):
        mm_topk(*arguments[:3], **keywords)


def native_kernel() -> Path:
    """The routing kernel of the first release that serves the model itself; one small file."""
    name = "vllm/model_executor/layers/fused_moe/router/dsv4_topk.py"
    folder = sources.CACHE.parent / "native-routing"
    if not (folder / name).exists():
        (wheel,) = wheels.releases("vllm", ("0.30.0",))
        wheels.fetch(wheel, folder, lambda member: member == name)
    return folder / name


def test_kernel_on_the_interpreter():
    """The Triton kernel, run by Triton's interpreter, against the reference and native vLLM's."""
    child = Path(__file__).parent / "in_vllm" / "child_kernel.py"
    done = subprocess.run(
        [sys.executable, str(child), str(native_kernel())],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rows checked: 0\n" not in done.stdout
