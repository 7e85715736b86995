"""Rows for the b12x kernel of forks: its own reference over its cache layout, and float64."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import wheel_files

from vision_exp.engine.spans import ImageSpan
from vision_exp.visibility import b12x, hooks, spans, support

WINDOW, IMAGE, NOPE, DIM = 128, 384, 448, 512
REFERENCE = "b12x/attention/_shared/mla/compressed_reference.py"
SCALE = DIM**-0.5


@dataclass
class Metadata:
    """What the forks' prefill and ours read of `DeepseekSparseSWAMetadata`."""

    block_table: torch.Tensor
    block_size: int
    num_decodes: int
    prefill_swa_indices: torch.Tensor
    prefill_swa_lens: torch.Tensor


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    folder = wheel_files.fetched("b12x", "1.5.1", lambda name: name == REFERENCE, "-reference")
    spec = importlib.util.spec_from_file_location("b12x_reference", folder / REFERENCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def causal_rows(table: torch.Tensor, page: int, starts: list[int], lens: list[int]) -> Any:
    """Slots and counts of each row's window as vLLM's builder makes them: (rows, 1, WINDOW)."""
    slots, counts = [], []
    for request, (start, length) in enumerate(zip(starts, lens, strict=True)):
        for position in range(start, start + length):
            seen = torch.arange(max(position - WINDOW + 1, 0), position + 1)
            slot = table[request, seen // page].long() * page + seen % page
            slots.append(torch.nn.functional.pad(slot, (0, WINDOW - len(seen)), value=-1))
            counts.append(len(seen))
    return torch.stack(slots)[:, None].int(), torch.tensor(counts, dtype=torch.int32)


@pytest.mark.parametrize(("page", "heads"), [(16, 8), (64, 16), (64, 32), (64, 128), (256, 64)])
def test_rows_attend_to_the_whole_image_and_its_window(
    reference: ModuleType, page: int, heads: int
) -> None:
    torch.manual_seed(page + heads)
    decodes, starts, lens = 1, [0, 150], [460, 260]
    images = [[ImageSpan(5, 389)], [ImageSpan(160, 163), ImageSpan(200 + heads, 266 + heads)]]
    total = len(starts) + decodes
    pages = -(-480 // page)
    table = (torch.randperm(total * pages) + 1).view(total, pages).int()
    count = (total * pages + 1) * page
    cache = reference.pack_compressed_sparse_mla_kv_cache_reference(
        torch.randn(count, NOPE), torch.randn(count, DIM - NOPE), page_size=page
    )
    keys = reference.unpack_compressed_sparse_mla_kv_cache_reference(cache, page_size=page)[0]
    found, base = [], 0
    for request, (start, length) in enumerate(zip(starts, lens, strict=True)):
        found += [spans.RowSpan(request, base + i.first - start, i) for i in images[request]]
        base += length
    rows = torch.cat([torch.arange(s.row, s.row + s.count) for s in found])
    none = torch.zeros(0)
    seen = spans.ImageVisibility(none, none, rows, tuple(found), WINDOW, IMAGE)
    indices, counts = causal_rows(table[decodes:], page, starts, lens)
    stock = Metadata(table, page, decodes, indices, counts)
    spans.attach(stock, seen)

    handed: list[Metadata] = []
    hooks._prefill_b12x(
        lambda layer, *, swa_metadata: handed.append(swa_metadata), None, swa_metadata=stock
    )
    (wide,) = handed
    # What `_validate_index_matrix_for_b12x` demands.
    slots, used = wide.prefill_swa_indices, wide.prefill_swa_lens
    assert slots.shape == (base, 1, WINDOW + IMAGE)
    assert slots.dtype == used.dtype == torch.int32
    column = torch.arange(slots.shape[-1])
    taken = slots[:, 0][column < used[:, None]]
    assert 0 < int(used.min()) <= int(used.max()) <= slots.shape[-1]
    assert 0 <= int(taken.min()) <= int(taken.max()) < count
    assert bool((slots[:, 0][column >= used[:, None]] == -1).all())
    # Rows of text, which keep theirs, and of images: every fifth, and both ends of each image.
    picked = sorted(
        {*range(0, base, 5), *(s.row for s in found), *(s.row + s.count - 1 for s in found)}
    )
    query, sink = torch.randn(len(picked), heads, DIM), torch.randn(heads)
    mine = reference.compressed_sparse_mla_reference(
        query,
        cache,
        slots[picked],
        used[picked],
        sm_scale=SCALE,
        attn_sink=sink,
        swa_page_size=page,
    )
    for index, row in enumerate(picked):
        request = int(row >= lens[0])
        position = starts[request] + row - request * lens[0]
        inside = [i for i in images[request] if i.first <= position < i.stop]
        first = min([max(position - WINDOW + 1, 0), *(i.first for i in inside)])
        stop = max([position + 1, *(i.stop for i in inside)])
        place = torch.arange(first, stop)
        own = keys[table[decodes + request, place // page].long() * page + place % page].double()
        scores = torch.cat([query[index].double() @ own.T * SCALE, sink.double()[:, None]], -1)
        want = torch.softmax(scores, -1)[:, :-1] @ own
        torch.testing.assert_close(mine[index].double(), want, rtol=0, atol=1e-4)


def test_a_step_of_text_gets_its_own_metadata() -> None:
    stock = Metadata(*([None] * 5))  # type: ignore[list-item]
    given = hooks._prefill_b12x(lambda _, swa_metadata: swa_metadata, None, swa_metadata=stock)
    assert given is stock


class FlashMLA:
    def _forward_prefill(self, swa_metadata: Any) -> Any:
        raise AssertionError("FlashMLA's own, which the forward of b12x does not call")

    def _reserve_dummy_compressed_mla_scratch(self, q: str) -> None: ...


@pytest.mark.parametrize("own", ["_forward_b12x_prefill", "_forward_prefill", None])
def test_the_prefill_that_the_class_calls_is_wrapped(
    monkeypatch: pytest.MonkeyPatch, own: str | None
) -> None:
    """Most branches leave the inherited method as it is, and call another one."""
    methods = {own: lambda self, swa_metadata: swa_metadata} if own else {}
    module: Any = ModuleType("b12x")
    module.DeepseekV4B12xMLAAttention = type("Fork", (FlashMLA,), methods)
    reason = support.b12x_reason("DeepseekV4B12xMLAAttention", module)
    hooks._wrap_b12x(module)
    if own is None:
        assert reason == "b12x-attention-lacks-_forward_prefill"
        return
    assert reason is None
    monkeypatch.setattr(hooks, "_note", lambda layer: None)
    monkeypatch.setattr(spans, "get", lambda metadata: "an image")
    monkeypatch.setattr(b12x, "widened", lambda seen, metadata: (seen, metadata))
    given = getattr(module.DeepseekV4B12xMLAAttention(), own)(swa_metadata="rows")
    assert given == ("an image", "rows")


@pytest.mark.parametrize(
    ("vision", "most", "reserved"),
    [
        (True, 8192, {(8192, WINDOW + IMAGE), (256, WINDOW + IMAGE)}),
        (True, 100, {(100, WINDOW + IMAGE)}),
        (False, 8192, {(8192, WINDOW)}),
    ],
)
def test_scratch_is_reserved_for_the_rows_of_images(
    vision: bool, most: int, reserved: set[tuple[int, int]]
) -> None:
    config = SimpleNamespace(model_type="deepseek_v4", vision_max_n_token=IMAGE)
    if vision:
        config.vision_n_layers = 1
    layer = SimpleNamespace(
        window_size=WINDOW,
        max_num_batched_tokens=most,
        compress_ratio=4,
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(hf_config=config)),
    )
    asked = set()

    def reserve(seen: Any, q: str) -> None:
        assert (seen.compress_ratio, q) == (4, "q")
        asked.add((seen.max_num_batched_tokens, seen.window_size))

    hooks._reserve_b12x(reserve, layer, "q")
    assert asked == reserved
