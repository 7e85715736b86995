"""Runs in one vLLM release: its real metadata builder and attention classes, on the CPU.

Triton kernels, vLLM's own and the overlay's, run in Triton's interpreter. The CUDA kernels that
attend are replaced by plain PyTorch attention over exactly the keys that the index rows name, so
what a layer writes can be compared with masked attention over whole sequences.
Prints one JSON object: check name -> what was seen.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # before tests/vision_exp

from vision_exp import step, visibility, visibility_flashinfer
from vision_exp.step import ImageSpan

WINDOW, IMAGE, BLOCK, DIM, HEADS = 128, 384, 64, 512, 2
SWA = "vllm.v1.attention.backends.mla.sparse_swa"


def use_triton() -> None:
    """vLLM's CPU build stands in for Triton; its kernels' sources are the CUDA build's."""
    import vllm

    real = ModuleType("vllm.triton_utils")
    real.__path__ = [str(Path(vllm.__file__).parent / "triton_utils")]  # its submodules are real
    names = {"HAS_TRITON": True, "triton": triton, "tl": tl, "LOG2E": 1.4426950408889634}
    names |= {"LOGE2": 0.6931471805599453, "tldevice": tl, "gluon": None, "gl": tl}
    names |= {"aggregate": lambda found: found, "use_tensor_descriptor": lambda: False}
    real.__dict__.update(names)
    sys.modules["vllm.triton_utils"] = real


@dataclass
class Request:
    """One request of a batch: `new` of its first `total` positions run now."""

    name: str
    total: int
    new: int
    images: tuple[tuple[int, int], ...] = ()  # START, END


@dataclass
class Batch:
    requests: list[Request]
    table: torch.Tensor

    @property
    def starts(self) -> list[int]:
        found = [0]
        for request in self.requests:
            found.append(found[-1] + request.new)
        return found


def batch(*requests: Request) -> Batch:
    """Decodes first, as runners order them; cache blocks in random order."""
    blocks = max(r.total for r in requests) // BLOCK + 1
    order = torch.randperm(len(requests) * blocks).to(torch.int32) + 1
    return Batch(list(requests), order.view(len(requests), blocks))


def new_builder(vision: bool) -> Any:
    from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

    swa = importlib.import_module(SWA)
    swa.get_mla_metadata = lambda: (swa.FlashMLASchedMeta(),)
    tower = {"vision_n_layers": 2, "vision_max_n_token": IMAGE} if vision else {}
    hf_config = SimpleNamespace(
        model_type="deepseek_v4", sliding_window=WINDOW, compress_ratios=[1, 4, 128], **tower
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf_config, max_model_len=4096),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=4096, max_num_seqs=8),
        speculative_config=None,
        parallel_config=SimpleNamespace(),
        attention_config=SimpleNamespace(use_non_causal=False),
    )
    spec = SlidingWindowMLASpec(
        block_size=BLOCK,
        num_kv_heads=1,
        head_size=DIM,
        dtype=torch.bfloat16,
        sliding_window=WINDOW,
        model_version="deepseek_v4",
    )
    return swa.DeepseekSparseSWAMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))


def metadata(builder: Any, work: Batch, images: bool) -> Any:
    """Built by the release's own builder; `images`: the step knows the batch's images."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor(work.starts, dtype=torch.int32)
    lens = torch.tensor([r.total for r in work.requests], dtype=torch.int32)
    spans = {
        r.name: tuple(ImageSpan(*image) for image in r.images) for r in work.requests if r.images
    }
    step.set_current(step.StepImages(bool(spans), spans) if images else step.NO_IMAGES)
    visibility.set_order([r.name for r in work.requests])
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        seq_lens_cpu_upper_bound=lens,
        num_reqs=len(work.requests),
        num_actual_tokens=work.starts[-1],
        max_query_len=max(r.new for r in work.requests),
        max_seq_len=int(lens.max()),
        block_table_tensor=work.table,
        slot_mapping=slot_mapping(work),
    )
    try:
        return builder.build(0, common)
    finally:
        step.set_current(step.NO_IMAGES)


def slot(work: Batch, request: int, position: int) -> int:
    return int(work.table[request, position // BLOCK]) * BLOCK + position % BLOCK


def slot_mapping(work: Batch) -> torch.Tensor:
    found = [
        slot(work, i, p)
        for i, r in enumerate(work.requests)
        for p in range(r.total - r.new, r.total)
    ]
    return torch.tensor(found, dtype=torch.int64)


def seen_by(request: Request, position: int, images: bool = True) -> range:
    """The rule, in plain Python."""
    first, last = max(position - WINDOW + 1, 0), position
    for start, end in request.images if images else ():
        if start <= position <= end:
            first, last = min(first, start), end
    return range(first, last + 1)


# Batches that the checks below share.
def long_image() -> Batch:
    return batch(Request("a", 640, 390, ((251, 614),)))


def several() -> Batch:
    return batch(Request("a", 345, 345, ((3, 60), (67, 200), (203, 340))))


def mixed() -> Batch:
    return batch(
        Request("d0", 40, 1),
        Request("d1", 900, 1, ((100, 300),)),  # its image is long done
        Request("text", 300, 60),
        Request("b", 430, 280, ((151, 300), (303, 429))),
        Request("c", 94, 94, ((3, 90),)),
        Request("text2", 30, 30),
        Request("e", 1000, 200, ((803, 999), (10, 90))),
    )


def decodes_only() -> Batch:
    return batch(Request("d0", 40, 1), Request("d1", 900, 1, ((100, 300),)))


def text_only() -> Batch:
    return batch(Request("d0", 40, 1), Request("text", 300, 200))


def offsets() -> list[Batch]:
    """Short and long spans at all alignments, with chunk ends at and near both of their ends."""
    found = []
    for before, length, after, fresh in (
        (0, 2, 0, True),
        (1, 60, 1, False),
        (62, 127, 0, False),
        (124, 128, 3, False),
        (300, 129, 0, False),
        (129, 381, 1, False),
    ):
        start = before + 3 - before % 4
        total = start + length + after
        new = total if fresh else total - start
        found.append(batch(Request("a", total, new, ((start, start + length - 1),))))
    return found


BATCHES = (long_image, several, mixed)


@cache
def built(make: Callable[[], Batch]) -> tuple[Batch, Any]:
    """A batch and its metadata; the interpreter is slow, so the checks share them."""
    work = make()
    return work, metadata(new_builder(vision=True), work, images=True)


def builder_rows() -> dict[str, Any]:
    """The wrapped builder on every batch: reach, slots and stock fields against the rule."""
    stock = new_builder(vision=False)
    bad: list[Any] = []
    for make in (*BATCHES, *((lambda work=work: work) for work in offsets())):
        work, wide = built(make)
        plain = metadata(stock, work, images=True)
        if visibility.of(plain) is not None:
            bad.append("text checkpoint")
        bad += differing(plain, wide)
        visible = visibility.of(wide)
        base, row = wide.num_decodes, 0
        indices, lens = visibility_flashinfer.slots(visible, wide)
        by_row = {int(r): i for i, r in enumerate(visible.rows)}
        for i, request in enumerate(work.requests[base:]):
            for position in range(request.total - request.new, request.total):
                keys = seen_by(request, position)
                left, right = int(visible.left[row]), int(visible.right[row])
                first = max(min(position - WINDOW + 1, position - left), 0)
                if range(first, position + right + 1) != keys:
                    bad.append((request, position, left, right))
                if (row in by_row) != (seen_by(request, position, False) != keys) and not any(
                    start <= position <= end for start, end in request.images
                ):
                    bad.append(("image row", request, position))
                if row in by_row:
                    at = by_row[row]
                    want = [slot(work, base + i, p) for p in keys]
                    got = indices[at, 0].tolist()
                    if got[: len(want)] != want or any(v != -1 for v in got[len(want) :]):
                        bad.append(("slots", request, position))
                    if int(lens[at]) != len(want):
                        bad.append(("lens", request, position))
                row += 1
    return {"bad": bad[:5]}


def differing(plain: Any, wide: Any) -> list[str]:
    """Fields of the stock metadata that the wrapper changed."""
    found = []
    for name, value in vars(plain).items():
        other = getattr(wide, name)
        if isinstance(value, torch.Tensor):
            if value.shape != other.shape or not torch.equal(value, other):
                found.append(name)
        elif not name.startswith("tile_sched") and value != other:
            found.append(name)
    return found


def nothing_to_widen() -> dict[str, Any]:
    """Text-only batches and decodes get nothing, and no function of the overlay runs."""
    builder, out = new_builder(vision=True), {}
    for make in (text_only, decodes_only):
        out[make.__name__] = visibility.of(metadata(builder, make(), images=True)) is None
    return out


def lost_order() -> str:
    builder = new_builder(vision=True)
    visibility.set_order([])
    keep, visibility.set_order = visibility.set_order, lambda _: None
    try:
        metadata(builder, long_image(), images=True)
    except RuntimeError as error:
        return str(error)
    finally:
        visibility.set_order = keep
    return "accepted"


# Plain attention: the one place that says what a kernel computes from index rows.
def attend(q: torch.Tensor, keys: list[torch.Tensor], scale: float, sink: torch.Tensor) -> Any:
    """q (heads, DIM) over the rows in `keys`; the sink takes part in the softmax's sum only."""
    found = torch.cat(keys).float()
    scores = q.float() @ found.T * scale
    top = torch.maximum(scores.max(-1).values, sink)
    weight = torch.exp(scores - top[:, None])
    return weight @ found / (weight.sum(-1) + torch.exp(sink - top))[:, None]


@dataclass
class Sequences:
    """Keys of every request by position, and the caches that hold them."""

    work: Batch
    window_keys: list[torch.Tensor]
    compressed_keys: list[torch.Tensor]
    window_cache: torch.Tensor
    compressed_cache: torch.Tensor
    compressed_table: torch.Tensor
    topk: torch.Tensor  # (rows of the batch, columns), positions in compressed_keys
    topk_lens: list[int]


def sequences(work: Batch, ratio: int) -> Sequences:
    size = 256 // ratio
    blocks = int(work.table.max()) + 1
    cache = torch.zeros(blocks, BLOCK, DIM)
    window_keys, compressed_keys = [], []
    for i, request in enumerate(work.requests):
        values = torch.randn(request.total, DIM) / 8
        window_keys.append(values)
        for position in range(request.total):
            cache.view(-1, DIM)[slot(work, i, position)] = values[position]
        compressed_keys.append(torch.randn(request.total // ratio, DIM) / 8 if ratio > 1 else None)
    most = max(r.total for r in work.requests) // 256 + 1
    table = torch.randperm(len(work.requests) * most).to(torch.int32).view(-1, most)
    compressed = torch.zeros(len(work.requests) * most, size, DIM)
    for i, keys in enumerate(compressed_keys):
        for at in range(0 if keys is None else len(keys)):
            compressed[table[i, at // size], at % size] = keys[at]
    columns = 16 if ratio == 4 else 4096 // 128
    topk, lens = [], []
    for request in work.requests:
        for position in range(request.total - request.new, request.total):
            have = (position + 1) // ratio if ratio > 1 else 0
            used = min(have, columns)
            chosen = random.sample(range(have), used) if ratio == 4 else list(range(used))
            topk.append(chosen + [7] * (columns - used))  # stale columns that must not be read
            lens.append(used)
    topk_rows = torch.tensor(topk, dtype=torch.int32)
    return Sequences(work, window_keys, compressed_keys, cache, compressed, table, topk_rows, lens)


def expected(data: Sequences, q: torch.Tensor, sink: torch.Tensor, images: bool) -> torch.Tensor:
    """Masked attention over whole sequences, for every row of the batch. (rows, heads, DIM)"""
    out, row = [], 0
    for i, request in enumerate(data.work.requests):
        for position in range(request.total - request.new, request.total):
            keys = [data.window_keys[i][seen_by(request, position, images)]]
            if data.compressed_keys[i] is not None:
                keys.append(data.compressed_keys[i][data.topk[row, : data.topk_lens[row]]])
            out.append(attend(q[row], keys, 0.1, sink))
            row += 1
    return torch.stack(out)


def layer(data: Sequences, ratio: int, sink: torch.Tensor, meta: Any, **more: Any) -> Any:
    return SimpleNamespace(
        compress_ratio=ratio,
        window_size=WINDOW,
        topk_indices_buffer=data.topk,
        scale=0.1,
        attn_sink=sink,
        PREFILL_CHUNK_SIZE=2,
        max_model_len=4096,
        max_num_batched_tokens=4096,
        **more,
    )


def compressed_metadata(data: Sequences, ratio: int, meta: Any) -> Any:
    if ratio == 1:
        return None
    return SimpleNamespace(
        block_table=data.compressed_table,
        block_size=256,
        c128a_prefill_topk_indices=data.topk[meta.num_decode_tokens :],
    )


def worst(found: torch.Tensor, want: torch.Tensor, causal: torch.Tensor) -> dict[str, float]:
    """Largest error, and how far causal attention would have been off: the check's own scale."""
    return {
        "error": float((found.float() - want).abs().max()),
        "causal": float((causal - want).abs().max()),
    }


@contextmanager
def replaced(module: Any, **names: Any) -> Any:
    kept = {name: getattr(module, name) for name in names}
    for name, value in names.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(module, name, value)


def flashmla() -> dict[str, Any]:
    """vLLM's `_forward_prefill` with its real chunking, gathering and index kernel, and ours."""
    module = importlib.import_module("vllm.models.deepseek_v4.nvidia.flashmla")
    out: dict[str, Any] = {}
    for make in BATCHES:
        for ratio in (1, 4, 128) if make is mixed else (4,):
            work, meta = built(make)
            data = sequences(work, ratio)
            rows = data.work.starts[-1]
            q = torch.randn(rows, HEADS, DIM)
            sink = torch.randn(HEADS)
            result = torch.zeros_like(q)
            names = replaced_kernels(module, q.dtype)
            decodes = meta.num_decode_tokens
            with replaced(module, **names):
                module.DeepseekV4FlashMLAAttention._forward_prefill(
                    layer(data, ratio, sink, meta),
                    q=q[decodes:],
                    positions=None,
                    compressed_k_cache=data.compressed_cache,
                    swa_k_cache=data.window_cache,
                    output=result[decodes:],
                    attn_metadata=compressed_metadata(data, ratio, meta),
                    swa_metadata=meta,
                )
            want, causal = (expected(data, q, sink, images)[decodes:] for images in (True, False))
            out[f"{make.__name__} {ratio}"] = worst(result[decodes:], want, causal)
    return out


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

    return {
        "current_workspace_manager": Workspace,
        "dequantize_and_gather_k_cache": gather,
        "flash_mla_sparse_fwd": sparse_fwd,
    }


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
            with replaced(module, flashinfer_trtllm_batch_decode_sparse_mla_dsv4=kernel):
                cls._forward_prefill(
                    fake,
                    q=q[decodes:],
                    compressed_k_cache=data.compressed_cache if ratio > 1 else None,
                    swa_k_cache=data.window_cache,
                    output=result[decodes:],
                    attn_metadata=compressed_metadata(data, ratio, meta),
                    swa_metadata=meta,
                )
            want, causal = (expected(data, q, sink, images)[decodes:] for images in (True, False))
            out[f"{make.__name__} {ratio}"] = worst(result[decodes:], want, causal)
    out["widths"] = sorted({width for _, width in calls})
    out["rows of wide calls"] = max(count for count, width in calls if width > 128)
    return out


def flashinfer_sm100() -> dict[str, Any]:
    """The second pass alone: vLLM's own pass over SM100's kernel is left out."""
    module = importlib.import_module("vllm.v1.attention.ops.flashmla")
    out: dict[str, Any] = {}
    for make in (mixed,):
        for ratio in (1, 4, 128):
            work, meta = built(make)
            data = sequences(work, ratio)
            for keys in (*data.window_keys, *(k for k in data.compressed_keys if k is not None)):
                keys.copy_(keys.to(torch.bfloat16))
            q = torch.randn(data.work.starts[-1], HEADS, DIM).to(torch.bfloat16)
            sink = torch.randn(HEADS)
            want, causal = (expected(data, q, sink, images) for images in (True, False))
            result = torch.zeros(len(q), 16, DIM)
            result[:, :HEADS] = causal
            original = lambda layer, **kwargs: None  # noqa: E731
            kernel = replaced_kernels(module, torch.float32)["flash_mla_sparse_fwd"]
            with replaced(module, flash_mla_sparse_fwd=kernel):
                visibility_flashinfer._forward_sm100(
                    original,
                    layer(data, ratio, pad(sink), meta),
                    q=q,
                    kv_cache=data.compressed_cache if ratio > 1 else None,
                    swa_k_cache=data.window_cache,
                    swa_metadata=meta,
                    attn_metadata=compressed_metadata(data, ratio, meta),
                    swa_only=ratio == 1,
                    output=result,
                )
            out[f"{make.__name__} {ratio}"] = worst(result[:, :HEADS], want, causal)
    return out


def pad(sink: torch.Tensor) -> torch.Tensor:
    return torch.cat([sink, torch.full((16 - HEADS,), -float("inf"))])


def described() -> dict[str, Any]:
    """The start-up answer of this (CPU) installation, as it is and with parts of it replaced."""
    config = SimpleNamespace(parallel_config=SimpleNamespace(), model_config=None)
    out: dict[str, Any] = {"cpu": real_describe(config), "missing": visibility.missing_hooks()}
    os.environ[visibility.REQUIRE_VARIABLE] = "1"
    try:
        real_describe(config)
        out["required"] = "accepted"
    except RuntimeError as error:
        out["required"] = str(error)
    finally:
        del os.environ[visibility.REQUIRE_VARIABLE]
    return out


real_describe = visibility.describe


def main() -> None:
    random.seed(0)
    torch.manual_seed(0)
    use_triton()
    visibility.install()
    visibility.install()
    # This machine has no GPU, where it would say `causal` and the builder would do nothing.
    visibility.describe = lambda config: visibility.BIDIRECTIONAL
    checks = [
        builder_rows,
        nothing_to_widen,
        lost_order,
        flashmla,
        flashinfer_sm120,
        flashinfer_sm100,
        described,
    ]
    chosen = sys.argv[1:]
    with torch.inference_mode():
        print(json.dumps({c.__name__: c() for c in checks if not chosen or c.__name__ in chosen}))


if __name__ == "__main__":
    main()
