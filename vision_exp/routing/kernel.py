"""`vision_exp.routing.mm_topk` as one Triton kernel.

One warp routes one row with its scores in registers. A round of the selection is two integer
reductions over the warp, one instruction each from Ampere on: the largest key, then the lowest
expert that has it. Keys are the biased scores' bits in an int32 form of the same order, so the
selection is exact. The chosen experts' scores are computed again from their logits, which are
still in the first-level cache.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vision_exp.routing.reference import MANY_ROWS


@dataclass(frozen=True)
class Launch:
    """How the work is cut: rows per program and warps per program."""

    rows: int = 1
    warps: int = 1


DEFAULT = Launch()


def plan_for(rows: int) -> Launch:
    """How to cut `rows` rows: many are faster by two on an H200 (bench/routing.py --variants)."""
    return Launch(rows=2) if rows >= MANY_ROWS else DEFAULT


@triton.jit
def _score(x):
    """sqrt(softplus(x)), to a few units in the last place over the whole range."""
    # softplus(x) = max(x, 0) + log1p(exp(-|x|)); log1p(y) / y as a polynomial on [0, 1],
    # relative error 2e-7, since log(1 + y) itself loses all digits of a small y. The root of y is
    # taken in the exponent: below -87 y itself is flushed to zero, and a row whose experts all lie
    # there would get no weights.
    root = tl.exp(-0.5 * tl.abs(x))
    y = root * root
    p = -0.0031760570127516985
    p = p * y + 0.019542526453733444
    p = p * y - 0.056373611092567444
    p = p * y + 0.10543623566627502
    p = p * y - 0.1526966691017151
    p = p * y + 0.1966327428817749
    p = p * y - 0.24951615929603577
    p = p * y + 0.33329710364341736
    p = p * y - 0.49999892711639404
    p = p * y + 1.0
    return tl.where(x > 0.0, tl.sqrt(x + y * p), root * tl.sqrt(p))


@triton.jit(do_not_specialize=["rows", "vocab"])
def _mm_topk_kernel(
    logits_ptr,  # (rows, EXPERTS) float32 or bfloat16, rows `stride` apart
    bias_ptr,  # (EXPERTS,) float32; unused if HASH
    bias_vl_ptr,  # (EXPERTS,) float32
    mask_ptr,  # (rows,) bool
    table_ptr,  # (vocab, TOP_K) integer; unused unless HASH
    tokens_ptr,  # (rows,) integer; unused unless HASH
    weights_ptr,  # (rows, TOP_K) float32, out
    ids_ptr,  # (rows, TOP_K) integer, out
    rows,
    stride,
    vocab,
    scale,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TOP_K: tl.constexpr,
    HASH: tl.constexpr,
    PDL: tl.constexpr,
):
    LOWEST: tl.constexpr = -2147483648  # below every key, minus infinity's included
    expert = tl.arange(0, BLOCK)
    exists = expert < EXPERTS
    slot = tl.arange(0, 8)
    wanted = slot < TOP_K

    # Weights do not change between launches, so they may be read before the wait.
    bias_vl = tl.load(bias_vl_ptr + expert, mask=exists, other=0.0)
    if not HASH:
        bias = tl.load(bias_ptr + expert, mask=exists, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()

    for i in tl.static_range(ROWS):
        # Programs that reach past the end route the last row again, to the same result.
        row = tl.minimum(tl.program_id(0) * ROWS + i, rows - 1).to(tl.int64)
        image = tl.load(mask_ptr + row) != 0
        line = logits_ptr + row * stride
        ids = tl.zeros([8], dtype=tl.int32)
        if HASH:
            token = tl.load(tokens_ptr + row).to(tl.int64)
            token = tl.minimum(tl.maximum(token, 0), vocab - 1)
            listed = tl.load(table_ptr + token * TOP_K + slot, mask=wanted, other=0)
            ids = listed.to(tl.int32)

        if (not HASH) or image:
            x = tl.load(line + expert, mask=exists, other=0.0).to(tl.float32)
            shift = bias_vl
            if not HASH:
                shift = tl.where(image, bias_vl, bias)
            biased = _score(x) + shift
            biased = tl.where(biased == biased, biased, float("-inf"))
            bits = biased.to(tl.int32, bitcast=True)
            key = tl.where(exists, bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST)
            for k in tl.static_range(TOP_K):
                best = tl.max(key, axis=0)
                chosen = tl.min(tl.where(key == best, expert, EXPERTS), axis=0)
                ids = tl.where(slot == k, chosen, ids)
                key = tl.where(expert == chosen, LOWEST, key)

        picked = tl.load(line + ids, mask=wanted, other=0.0).to(tl.float32)
        weight = tl.where(wanted, _score(picked), 0.0)
        total = tl.sum(weight, axis=0)
        weight *= scale / tl.where(total > 0.0, total, 1.0)
        if PDL and i == ROWS - 1:
            tl.extra.cuda.gdc_launch_dependents()
        out = row * TOP_K + slot
        tl.store(weights_ptr + out, weight, mask=wanted)
        tl.store(ids_ptr + out, ids.to(ids_ptr.dtype.element_ty), mask=wanted)


@functools.cache
def _programmatic_launch(device: int) -> bool:
    """True where a kernel may start before its predecessor in the stream has ended."""
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] >= 9


def launch(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    bias_vl: torch.Tensor,
    image_mask: torch.Tensor,
    *,
    top_k: int,
    scale: float,
    tid2eid: torch.Tensor | None,
    token_ids: torch.Tensor | None,
    ids_dtype: torch.dtype = torch.int32,
    plan: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and result of `mm_topk`, whose checks have passed; `plan` cuts the work
    (None: by the number of rows)."""
    rows, experts = logits.shape
    weights = torch.empty((rows, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, top_k), dtype=ids_dtype, device=logits.device)
    if rows == 0:
        return weights, ids
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    plan = plan or plan_for(rows)
    options = {"num_warps": plan.warps}
    pdl = logits.is_cuda and _programmatic_launch(logits.device.index)
    if pdl:
        options["launch_pdl"] = True
    _mm_topk_kernel[(triton.cdiv(rows, plan.rows),)](
        logits,
        bias if bias is not None else bias_vl,
        bias_vl,
        image_mask.contiguous(),
        tid2eid.contiguous() if tid2eid is not None else image_mask,
        token_ids.contiguous() if token_ids is not None else image_mask,
        weights,
        ids,
        rows,
        logits.stride(0),
        tid2eid.shape[0] if tid2eid is not None else 1,
        scale,
        EXPERTS=experts,
        BLOCK=triton.next_power_of_2(experts),
        ROWS=plan.rows,
        TOP_K=top_k,
        HASH=tid2eid is not None,
        PDL=pdl,
        **options,
    )
    return weights, ids
