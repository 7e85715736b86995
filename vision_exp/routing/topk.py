"""Expert selection for a batch that mixes text and image tokens.

An image row takes the top k of `sqrt(softplus(logits)) + bias_vl`, in every layer. A text row takes
the top k of the same scores plus the text bias or, in a hash layer, the experts that the table
lists for its token. Weights are the unbiased scores of the chosen experts, normalised to sum 1 and
scaled. Nothing here waits for the device or has a shape that depends on data.
"""

from __future__ import annotations

import torch

from vision_exp.routing.reference import MAX_TOP_K, mm_topk_reference


def mm_topk(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    bias_vl: torch.Tensor,
    image_mask: torch.Tensor,
    *,
    top_k: int,
    scale: float,
    tid2eid: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
    ids_dtype: torch.dtype = torch.int32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route every row: (weights float32 (rows, top_k), expert ids `ids_dtype` (rows, top_k)).

    logits: (rows, experts), float32 or bfloat16. bias: (experts,) float32, the text rows' bias,
    ignored if `tid2eid` is given. bias_vl: (experts,) float32. image_mask: (rows,) bool.
    tid2eid: (vocab, top_k) int32 or int64, with token_ids: (rows,) int32 or int64.

    Experts come in falling order of biased score (hash rows: in table order), ties by lower
    number; a NaN counts as minus infinity. Ids are always in range, also for NaN rows; token ids
    outside the table are read as the nearest one inside it. A row whose chosen scores are all
    zero gets zero weights. Runs as one Triton kernel on a GPU and as PyTorch elsewhere.

    Raises ValueError on arguments that do not fit together.
    """
    _check(logits, bias, bias_vl, image_mask, top_k, tid2eid, token_ids, ids_dtype)
    if logits.is_cuda:
        from vision_exp.routing.kernel import launch

        return launch(
            logits,
            bias,
            bias_vl,
            image_mask,
            top_k=top_k,
            scale=scale,
            tid2eid=tid2eid,
            token_ids=token_ids,
            ids_dtype=ids_dtype,
        )
    weights, ids = mm_topk_reference(
        logits,
        bias,
        bias_vl,
        image_mask,
        top_k=top_k,
        scale=scale,
        tid2eid=tid2eid,
        token_ids=token_ids,
    )
    return weights, ids.to(ids_dtype)


def _check(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    bias_vl: torch.Tensor,
    image_mask: torch.Tensor,
    top_k: int,
    tid2eid: torch.Tensor | None,
    token_ids: torch.Tensor | None,
    ids_dtype: torch.dtype,
) -> None:
    """Host-side checks only; no tensor's values are read."""
    if logits.ndim != 2 or logits.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"logits must be 2-D float32 or bfloat16, not {logits.ndim}-D {logits.dtype}"
        )
    rows, experts = logits.shape
    if not 1 <= top_k <= min(MAX_TOP_K, experts):
        raise ValueError(f"top_k must be 1 to {min(MAX_TOP_K, experts)}, not {top_k}")
    if bias_vl.shape != (experts,) or bias_vl.dtype != torch.float32:
        raise ValueError(
            f"bias_vl must be float32 ({experts},), not {bias_vl.dtype} {tuple(bias_vl.shape)}"
        )
    if image_mask.shape != (rows,) or image_mask.dtype != torch.bool:
        raise ValueError(
            f"image_mask must be bool ({rows},), not {image_mask.dtype} {tuple(image_mask.shape)}"
        )
    if tid2eid is None:
        if bias is None or bias.shape != (experts,) or bias.dtype != torch.float32:
            raise ValueError(f"text rows need a float32 ({experts},) bias or a hash table")
    elif tid2eid.ndim != 2 or tid2eid.shape[1] != top_k:
        raise ValueError(f"tid2eid must be (vocab, {top_k}), not {tuple(tid2eid.shape)}")
    elif token_ids is None or token_ids.shape != (rows,):
        raise ValueError(f"hash routing needs token_ids of shape ({rows},)")
    if ids_dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids_dtype must be int32 or int64, not {ids_dtype}")
