"""Checks of each kind of attention: the release's own prefill around stand-ins for CUDA kernels.

A stand-in attends plainly over exactly the keys that the index rows name, so what a layer writes
can be compared with masked attention over whole sequences.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from checks import equal
from rig_attention import (
    attend,
    compressed_metadata,
    expected,
    layer,
    replaced,
    sequences,
    worst,
)
from rig_visibility import BATCHES, DIM, HEADS, Request, batch, built, metadata, mixed, new_builder

from vision_exp.engine import context
from vision_exp.engine.sightings import Block, Layers, Sightings
from vision_exp.visibility import flashinfer, hooks

#: Compression of the kinds of layers: none, C4A, C128A.
KINDS = (1, 4, 128)


def flashmla() -> dict[str, Any]:
    """vLLM's `_forward_prefill` with its real chunking, gathering and index kernel, and ours."""
    module = importlib.import_module("vllm.models.deepseek_v4.nvidia.flashmla")
    cases = [(make, *built(make)) for make in BATCHES]
    return prefilled(module, module.DeepseekV4FlashMLAAttention, cases)


def prefilled(
    module: Any, attention: Any, cases: list[Any], ratios: tuple[int, ...] = ()
) -> dict[str, Any]:
    """What `attention._forward_prefill` writes for each (name's function, batch, metadata), in
    layers of these kinds."""
    out: dict[str, Any] = {}
    for make, work, meta in cases:
        for ratio in ratios or (KINDS if make is mixed else (4,)):
            data = sequences(work, ratio)
            rows = data.work.starts[-1]
            q = torch.randn(rows, HEADS, DIM)
            sink = torch.randn(HEADS)
            result = torch.zeros_like(q)
            names = replaced_kernels(module, q.dtype)
            decodes = meta.num_decode_tokens
            with replaced(module, **names):
                attention._forward_prefill(
                    layer(data, ratio, sink, meta, head_dim=DIM, nope_head_dim=0, rope_head_dim=0),
                    q=q[decodes:],
                    positions=None,
                    compressed_k_cache=data.compressed_cache,
                    swa_k_cache=data.window_cache,
                    output=result[decodes:],
                    attn_metadata=compressed_metadata(data, ratio, meta),
                    swa_metadata=meta,
                )
            want, causal = (each[decodes:] for each in expected(data, q, sink))
            out[f"{make.__name__} {ratio}"] = worst(result[decodes:], want, causal)
    return out


def passed_by() -> dict[str, list[str]]:
    """What a prefill in a step with an image leaves out: as it should be, and with each fault."""
    module = importlib.import_module("vllm.models.deepseek_v4.nvidia.flashmla")
    stock = module.DeepseekV4FlashMLAAttention
    # Past the overlay's wrapper, as a class of a fork that defines the method itself.
    own_prefill = stock._forward_prefill.__wrapped__
    unwrapped = {"combine_topk_swa_indices": module.combine_topk_swa_indices.__wrapped__}
    builder = new_builder(vision=True)
    work = batch(Request("a", 40, 40, ((3, 30),)))
    meta = metadata(builder, work, images=True)
    own_build = type(builder).build.__wrapped__
    subclass = type("OwnBuild", (type(builder),), {"build": lambda *args: own_build(*args)})
    fault = object.__new__(subclass)
    fault.__dict__.update(vars(builder))
    narrow = metadata(fault, work, images=True)
    return {
        "as it should be": left_out(module, work, meta, stock._forward_prefill),
        "a builder with its own build": left_out(module, work, narrow, stock._forward_prefill),
        "a class with its own prefill": left_out(module, work, meta, own_prefill),
        "index rows by another name": left_out(
            module, work, meta, stock._forward_prefill, **unwrapped
        ),
        "a step of text": left_out(module, work, meta, stock._forward_prefill, images=False),
    }


def left_out(
    module: Any, work: Any, meta: Any, prefill: Any, *, images: bool = True, **names: Any
) -> list[str]:
    data = sequences(work, 1)
    q = torch.randn(data.work.starts[-1], HEADS, DIM)
    attention = layer(data, 1, torch.randn(HEADS), meta)
    kernels = {**replaced_kernels(module, q.dtype), **names}
    kernels["flash_mla_sparse_fwd"] = lambda **kwargs: None  # what it computes is flashmla()'s
    seen = Sightings()
    context.set_current(context.StepContext(True, seen=seen if images else None))
    try:
        with replaced(module, **kernels):
            prefill(
                attention,
                q=q,
                positions=None,
                compressed_k_cache=None,
                swa_k_cache=data.window_cache,
                output=torch.zeros_like(q),
                attn_metadata=None,
                swa_metadata=meta,
            )
    finally:
        context.set_current(context.NO_IMAGES)
    seen.routed[1] = torch.ones(1, dtype=torch.bool)
    return Layers((Block("layers.7", 1, id(attention)),)).unseen(seen)


def replaced_kernels(module: Any, dtype: torch.dtype) -> dict[str, Any]:
    class Workspace:
        def get_simultaneous(self, *shapes: Any) -> list[torch.Tensor]:
            kinds = [torch.int32 if kind == torch.int32 else dtype for _, kind in shapes]
            return [
                torch.full(shape, -7, dtype=kind)
                for (shape, _), kind in zip(shapes, kinds, strict=True)
            ]

    def gather(
        out: torch.Tensor,
        cache: torch.Tensor,
        *,
        seq_lens: torch.Tensor,
        gather_lens: Any,
        block_table: torch.Tensor,
        block_size: int,
        offset: int,
        use_fnuz: bool = False,
    ) -> None:
        for i, stop in enumerate(seq_lens.tolist()):
            count = stop if gather_lens is None else int(gather_lens[i])
            position = torch.arange(stop - count, stop)
            block = block_table[i, position // block_size].long()
            out[i, offset : offset + count] = cache[block, position % block_size]

    def sparse_fwd(*, q: Any, kv: Any, indices: Any, sm_scale: Any, attn_sink: Any, **rest: Any):
        if indices.shape[-1] % 128:
            raise ValueError(f"{indices.shape[-1]} columns")
        for row in range(len(q)):
            used = indices[row, 0, : int(rest["topk_length"][row])].long()
            if bool((used < 0).any()) or bool((used >= len(kv)).any()):
                raise IndexError(f"row {row}")
            rest["out"][row] = attend(q[row], [kv[used, 0]], sm_scale, attn_sink)

    def rocm_fwd(*, indices: Any, topk_length: Any, scale: Any, output: Any, **rest: Any) -> None:
        kept = {name: rest[name] for name in ("q", "kv", "attn_sink")}
        rows = indices.reshape(len(indices), 1, -1)
        sparse_fwd(**kept, indices=rows, sm_scale=scale, topk_length=topk_length, out=output)

    kernels = {
        "current_workspace_manager": Workspace,
        "dequantize_and_gather_k_cache": gather,
        "flash_mla_sparse_fwd": sparse_fwd,
        "rocm_sparse_attn_prefill": rocm_fwd,
    }
    return {name: kernel for name, kernel in kernels.items() if hasattr(module, name)}


def flashinfer_sm120() -> dict[str, Any]:
    """vLLM's `_forward_prefill` for SM120 over a stand-in with FlashInfer's limits."""
    module = importlib.import_module("vllm.models.deepseek_v4.nvidia.flashinfer_sparse")
    cls = module.DeepseekV4FlashInferSM120Attention
    calls: list[tuple[int, int]] = []

    def kernel(*, query: Any, swa_kv_cache: Any, sparse_indices: Any, out: Any, **rest: Any):
        count, width = query.shape[0], sparse_indices.shape[-1]
        calls.append((count, width))
        extra = rest["extra_sparse_indices"]
        if count > 64 and extra is not None and width != 128:
            raise ValueError("two caches in prefill take 128 keys")
        if count <= 64 and width not in (128, 512, 1024):
            raise ValueError(f"no decode kernel for {width} keys")
        if sparse_indices.stride(0) != width:
            raise ValueError("index rows are not dense")
        for row in range(count):
            used = sparse_indices[row, 0, : int(rest["swa_topk_lens"][row])].long()
            keys = [swa_kv_cache.reshape(-1, DIM)[used]]
            if extra is not None:
                lens = rest["extra_sparse_topk_lens"]
                used = extra[row, : int(lens[row])].long()
                keys.append(rest["compressed_kv_cache"].reshape(-1, DIM)[used])
            out[row] = attend(query[row], keys, rest["bmm1_scale"], rest["sinks"])

    out: dict[str, Any] = {}
    seen = Sightings()
    for make in (mixed,):
        for ratio in (1, 4, 128):
            work, meta = built(make)
            data = sequences(work, ratio)
            # The stand-in for the top-k kernel counts entries that are not -1.
            for row, used in enumerate(data.topk_lens):
                data.topk[row, used:] = -1
            q = torch.randn(data.work.starts[-1], HEADS, DIM)
            sink = torch.randn(HEADS)
            result = torch.zeros_like(q)
            decodes = meta.num_decode_tokens
            fake = layer(
                data,
                ratio,
                sink,
                meta,
                _prepare_query=lambda q, output: q,
                _as_sparse_cache=lambda cache: cache,
                _get_workspace=lambda device: torch.empty(1 << 20, dtype=torch.uint8),
                _global_topk_output_buffers=lambda topk: None,
            )
            with (
                replaced(module, flashinfer_trtllm_batch_decode_sparse_mla_dsv4=kernel),
                context.during(seen=seen),
            ):
                cls._forward_prefill(
                    fake,
                    q=q[decodes:],
                    compressed_k_cache=data.compressed_cache if ratio > 1 else None,
                    swa_k_cache=data.window_cache,
                    output=result[decodes:],
                    attn_metadata=compressed_metadata(data, ratio, meta),
                    swa_metadata=meta,
                )
            want, causal = (each[decodes:] for each in expected(data, q, sink))
            out[f"{make.__name__} {ratio}"] = worst(result[decodes:], want, causal)
            equal(id(fake) in seen.attended, True, "noted")
    out["widths"] = sorted({width for _, width in calls})
    out["rows of wide calls"] = max(count for count, width in calls if width > 128)
    return out


def flashinfer_sm100_long() -> dict[str, Any]:
    """The same where an image's compressed keys are too many to be copied whole."""
    topk = sequences(built(mixed)[0], 4).topk.shape[-1]
    limit = 7 * topk  # of rows, by seven: not a divisor of any image
    sizes: list[int] = []
    gathered = flashinfer.gathered

    def counted(*args: Any, **kwargs: Any) -> Any:
        found = gathered(*args, **kwargs)
        sizes.append(len(found[0]))
        return found

    with replaced(flashinfer, SM100_KEYS=0, sm100_rows=lambda *_: 7, gathered=counted):
        out = flashinfer_sm100(ratios=(4,))
    return {**out, "most": max(sizes), "limit": limit + 128 + 384, "calls": len(sizes)}


def flashinfer_sm100(ratios: tuple[int, ...] = (1, 4, 128)) -> dict[str, Any]:
    """The second pass alone: vLLM's own pass over SM100's kernel is left out."""
    module = importlib.import_module("vllm.v1.attention.ops.flashmla")
    out: dict[str, Any] = {}
    seen = Sightings()
    for make in (mixed,):
        for ratio in ratios:
            work, meta = built(make)
            data = sequences(work, ratio)
            for keys in (*data.window_keys, *(k for k in data.compressed_keys if k is not None)):
                keys.copy_(keys.to(torch.bfloat16))
            q = torch.randn(data.work.starts[-1], HEADS, DIM).to(torch.bfloat16)
            sink = torch.randn(HEADS)
            want, causal = expected(data, q, sink)
            result = torch.zeros(len(q), 16, DIM)
            result[:, :HEADS] = causal
            original = lambda layer, **kwargs: None  # noqa: E731
            kernel = replaced_kernels(module, torch.float32)["flash_mla_sparse_fwd"]
            fake = layer(data, ratio, pad(sink), meta)
            with replaced(module, flash_mla_sparse_fwd=kernel), context.during(seen=seen):
                hooks._forward_sm100(
                    original,
                    fake,
                    q=q,
                    kv_cache=data.compressed_cache if ratio > 1 else None,
                    swa_k_cache=data.window_cache,
                    swa_metadata=meta,
                    attn_metadata=compressed_metadata(data, ratio, meta),
                    swa_only=ratio == 1,
                    output=result,
                )
            out[f"{make.__name__} {ratio}"] = worst(result[:, :HEADS], want, causal)
            equal(id(fake) in seen.attended, True, "noted")
    return out


def pad(sink: torch.Tensor) -> torch.Tensor:
    return torch.cat([sink, torch.full((16 - HEADS,), -float("inf"))])
