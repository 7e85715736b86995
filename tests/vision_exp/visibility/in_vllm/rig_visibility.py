"""What the visibility checks share: batches of requests, and a release's metadata for them.

vLLM's Triton kernels and the overlay's run in Triton's interpreter.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl

from vision_exp.engine import context
from vision_exp.engine.spans import ImageSpan

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
    blocks: list[list[int]]  # the table's entries; asking a tensor for each takes seconds

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
    table = order.view(len(requests), blocks)
    return Batch(list(requests), table, table.tolist())


def new_builder(vision: bool, speculative: Any = None, builder: Any = None) -> Any:
    """The release's own metadata builder, or one of another class."""
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
        speculative_config=speculative,
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
    builder = builder or swa.DeepseekSparseSWAMetadataBuilder
    return builder(spec, ["layer"], config, torch.device("cpu"))


def publish_order(names: list[str]) -> None:
    """What the wrapper of V2's `prepare_attn` does before vLLM's own."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    wrapper = GPUModelRunner.prepare_attn.__dict__["__vision_exp_wrapper__"]
    wrapper(lambda runner, batch: None, None, SimpleNamespace(req_ids=names))


def metadata(builder: Any, work: Batch, images: bool, order: bool = True) -> Any:
    """Built by the release's own builder; `images`: the step knows the batch's images."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor(work.starts, dtype=torch.int32)
    lens = torch.tensor([r.total for r in work.requests], dtype=torch.int32)
    spans = {
        r.name: tuple(ImageSpan(start, end + 1) for start, end in r.images)
        for r in work.requests
        if r.images
    }
    context.set_current(context.StepContext(bool(spans), spans) if images else context.NO_IMAGES)
    if order:
        publish_order([r.name for r in work.requests])
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
        context.set_current(context.NO_IMAGES)


def slot(work: Batch, request: int, position: int) -> int:
    return work.blocks[request][position // BLOCK] * BLOCK + position % BLOCK


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
