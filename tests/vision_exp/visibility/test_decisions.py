"""Every branch of "can image rows see each other here": what it asks of CUDA is given to it."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vision_exp.engine import context
from vision_exp.engine.spans import ImageSpan
from vision_exp.visibility import hooks, support
from vision_exp.visibility import spans as row_math

SHAPES = {(64, 640)}


class Layer:
    """What a FlashInfer layer says of its heads: at least 64."""

    @staticmethod
    def get_padded_num_q_heads(heads: int) -> int:
        return max(64, heads)


@dataclasses.dataclass
class Metadata:
    prefill_swa_indices: int = 0
    prefill_seq_lens_cpu: int = 0
    prefill_query_lens_cpu: int = 0


def module(name: str, **attributes: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(attributes)
    return made


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The parts of a vLLM on CUDA that the decision reads, by the module they are in."""
    pieces = {
        "vllm": module("vllm"),
        "vllm.platforms": module(
            "vllm.platforms",
            current_platform=SimpleNamespace(is_cuda=lambda: True, is_rocm=lambda: False),
        ),
        support.ROCM: module(
            support.ROCM,
            DeepseekV4ROCMAiterMLAAttention=SimpleNamespace(_forward_prefill=1),
            DeepseekV4ROCMAiterSparseSWAMetadataBuilder=SimpleNamespace(build=1),
            combine_topk_swa_indices=1,
        ),
        support.SWA: module(support.SWA, DeepseekSparseSWAMetadata=Metadata),
        support.FLASHMLA: module(
            support.FLASHMLA,
            DeepseekV4FlashMLAAttention=SimpleNamespace(_forward_prefill=1),
            combine_topk_swa_indices=1,
        ),
        support.FLASHINFER: module(
            support.FLASHINFER,
            DeepseekV4FlashInferSM120Attention=type("L", (Layer,), {"_forward_prefill": 1}),
            DeepseekV4FlashInferMLAAttention=SimpleNamespace(_forward=1),
        ),
        support.B12X: module(
            support.B12X,
            DeepseekV4B12xMLAAttention=SimpleNamespace(
                _forward_prefill=1, _reserve_dummy_compressed_mla_scratch=1
            ),
            DeepseekV4B12xAttention=SimpleNamespace(_forward_prefill=1),
        ),
        "vllm.models.deepseek_v4.nvidia": module("nvidia"),
        "vllm.v1.attention.ops.flashmla": module(
            "ops", is_flashmla_sparse_supported=lambda: (True, None)
        ),
        "flashinfer.mla._sparse_mla_sm120": module("sm120", _DECODE_DSV4_DISPATCH=SHAPES),
        "vllm.v1.worker.gpu.model_runner": module(
            "runner", GPUModelRunner=SimpleNamespace(prepare_attn=1)
        ),
    }
    for name, piece in pieces.items():
        monkeypatch.setitem(sys.modules, name, piece)
    select(pieces, "DeepseekV4FlashMLAAttention")
    return pieces


def select(world: dict[str, Any], name: str) -> None:
    chosen = SimpleNamespace(_select_dsv4_attn_cls=lambda config: SimpleNamespace(__name__=name))
    world["vllm.models.deepseek_v4.nvidia"].model = chosen


def config(heads: int = 64, ranks: int = 1, **parallel: Any) -> Any:
    hf_config = SimpleNamespace(
        sliding_window=128, vision_max_n_token=512, num_attention_heads=heads
    )
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks, **parallel),
        model_config=SimpleNamespace(hf_config=hf_config),
    )


def test_flashmla_on_cuda_is_bidirectional(world: dict[str, Any]) -> None:
    one = {"prefill_context_parallel_size": 1, "decode_context_parallel_size": 1}
    assert support.describe(config(use_ubatching=False, **one)) == "bidirectional"


@pytest.mark.parametrize(
    ("parallel", "reason"),
    [
        ({"use_ubatching": True}, "micro-batches-reorder-requests"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size-above-1"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size-above-1"),
    ],
)
def test_what_shares_or_reorders_rows_is_causal(
    world: dict[str, Any], parallel: dict[str, Any], reason: str
) -> None:
    assert support.describe(config(**parallel)) == f"causal reason={reason}"


def test_another_platform_is_causal(world: dict[str, Any]) -> None:
    platform = SimpleNamespace(is_cuda=lambda: False, is_rocm=lambda: False)
    world["vllm.platforms"].current_platform = platform
    assert support.describe(config()) == "causal reason=platform-is-not-cuda-or-rocm"


def test_rocm_asks_nothing_of_cudas_modules(world: dict[str, Any]) -> None:
    platform = SimpleNamespace(is_cuda=lambda: False, is_rocm=lambda: True)
    world["vllm.platforms"].current_platform = platform
    for name in ("vllm.models.deepseek_v4.nvidia", support.FLASHMLA, support.FLASHINFER):
        sys.modules[name] = None  # type: ignore[assignment]
    assert support.describe(config()) == "bidirectional"
    for name in (
        "DeepseekV4ROCMAiterMLAAttention",
        "DeepseekV4ROCMAiterSparseSWAMetadataBuilder",
        "combine_topk_swa_indices",
    ):
        kept = world[support.ROCM].__dict__.pop(name)
        assert f"release-lacks-{name}" in support.describe(config())
        setattr(world[support.ROCM], name, kept)


@pytest.mark.parametrize(
    ("name", "heads", "ranks", "reason"),
    [
        ("DeepseekV4FlashInferSM120Attention", 64, 1, None),
        ("DeepseekV4FlashInferSM120Attention", 128, 2, None),  # shared among the ranks
        ("DeepseekV4FlashInferSM120Attention", 64, 4, None),  # padded
        ("DeepseekV4FlashInferSM120Attention", 128, 1, "no-kernel-for-128-heads-640-keys"),
        ("DeepseekV4FlashInferMLAAttention", 64, 1, None),
        ("DeepseekV4FlashInferOther", 64, 1, "unknown-attention-class-DeepseekV4FlashInferOther"),
        ("DeepseekV4B12xMLAAttention", 64, 1, None),
        ("DeepseekV4B12xAttention", 64, 1, "b12x-attention-lacks-_reserve_profile_workspace"),
        ("Other", 64, 1, "unknown-attention-class-Other"),
    ],
)
def test_each_attention_class(
    world: dict[str, Any], name: str, heads: int, ranks: int, reason: str | None
) -> None:
    select(world, name)
    found = support.describe(config(heads, ranks))
    assert found == "bidirectional" if reason is None else found.endswith(reason)


def test_flashinfer_without_its_kernels_is_causal(world: dict[str, Any]) -> None:
    select(world, "DeepseekV4FlashInferMLAAttention")
    world["vllm.v1.attention.ops.flashmla"].is_flashmla_sparse_supported = lambda: (False, "old")
    assert "flashmla-is-missing" in support.describe(config())
    select(world, "DeepseekV4FlashInferSM120Attention")
    world["flashinfer.mla._sparse_mla_sm120"]._DECODE_DSV4_DISPATCH = set()
    assert "has-no-kernel-for-64-heads-640-keys" in support.describe(config())
    del world["flashinfer.mla._sparse_mla_sm120"]._DECODE_DSV4_DISPATCH
    assert "has-no-sm120-sparse-mla" in support.describe(config())


def test_a_release_that_lacks_a_hook_is_causal(world: dict[str, Any]) -> None:
    for place, name in (
        (support.FLASHMLA, "combine_topk_swa_indices"),
        (support.FLASHINFER, "DeepseekV4FlashInferMLAAttention"),
        ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner"),
    ):
        kept = world[place].__dict__.pop(name)
        assert f"release-lacks-{name}" in support.describe(config())
        setattr(world[place], name, kept)
    less = dataclasses.make_dataclass("Less", ["prefill_swa_indices", "prefill_query_lens_cpu"])
    world[support.SWA].DeepseekSparseSWAMetadata = less
    assert "release-lacks-prefill_seq_lens_cpu" in support.describe(config())


def test_visibility_that_is_required(
    world: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(support.REQUIRE_VISIBILITY.name, "1")
    with pytest.raises(RuntimeError, match="micro-batches"):
        support.describe(config(use_ubatching=True))
    monkeypatch.setenv(support.REQUIRE_VISIBILITY.name, "0")
    assert support.describe(config(use_ubatching=True)).startswith("causal")


@pytest.mark.parametrize("images", [True, False])
def test_both_runners_publish_the_order_of_a_batch_with_images(images: bool) -> None:
    spans = {"a": (ImageSpan(0, 9),)} if images else {}
    batch = SimpleNamespace(req_ids=["b", "a"])
    calls = (
        lambda seen: hooks._order_v1(seen, SimpleNamespace(input_batch=batch)),
        lambda seen: hooks._order_v2(seen, SimpleNamespace(), batch),
    )
    for call in calls:
        before = context.set_current(context.StepContext(images, spans))
        try:
            assert call(lambda *_: context.current().request_ids) == (("b", "a") if images else ())
        finally:
            context.set_current(before)


def metadata(**changes: Any) -> Any:
    import torch

    lens = {"prefill_query_lens_cpu": torch.tensor([20, 0]), "num_prefill_tokens": 20}
    seq = {"prefill_seq_lens_cpu": torch.tensor([20, 0]), "seq_lens": torch.zeros(1)}
    return SimpleNamespace(**{"num_prefills": 2, "num_decodes": 1, **lens, **seq, **changes})


def test_rows_of_a_padded_batch_behind_a_decode() -> None:
    images = {"a": (ImageSpan(0, 19, 3),), "decode": (ImageSpan(0, 10, 3),)}
    found = row_math.image_visibility(metadata(), images, ["decode", "a"], 8, 16)
    assert found is not None  # an image exactly as long as the config allows
    assert found.rows.tolist() == list(range(3, 19))
    assert found.lookahead.tolist() == [0] * 3 + list(range(15, -1, -1)) + [0]
    assert [found.any_in(*part) for part in ((0, 3), (0, 4), (18, 30), (19, 30))] == [
        False,
        True,
        True,
        False,
    ]
    with pytest.raises(ValueError, match="exceeds"):
        row_math.image_visibility(metadata(), images, ["decode", "a"], 8, 15)
    assert row_math.image_visibility(metadata(), {}, ["decode", "a"], 8, 16) is None
    partial = {"a": (ImageSpan(0, 21, 3),)}
    assert row_math.image_visibility(metadata(), partial, ["decode", "a"], 8, 16) is None


def test_images_of_a_later_group_are_found() -> None:
    images = {"a": (ImageSpan(0, 4), ImageSpan(10, 14))}
    found = row_math.image_visibility(metadata(), images, ["x", "a"], 8, 16)
    assert found is not None and found.any_in(9, 12) and not found.any_in(5, 9)
