"""Which layers may route images, branch by branch, and which rows a layer takes for images."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vision_exp import layout
from vision_exp.engine import context
from vision_exp.routing import select, support
from vision_exp.routing.reference import MANY_ROWS
from vision_exp.routing.support import RoutingUnsupported


def moe(**changes: Any) -> Any:
    whole = {
        "prefix": "layers.3",
        "scoring_func": "sqrtsoftplus",
        "renormalize": True,
        "n_activated_experts": 2,
        "n_routed_experts": 6,
        "use_mega_moe": False,
        "routed_scaling_factor": 1.5,
        "hash_indices_dtype": torch.int32,
        "experts": SimpleNamespace(runner=runner()),
        "gate": gate(),
    }
    return SimpleNamespace(**{**whole, **changes})


def gate(**changes: Any) -> Any:
    torch.manual_seed(0)
    stock = {"e_score_correction_bias": torch.randn(6), select.BIAS_VL: torch.randn(6)}
    return SimpleNamespace(**{**stock, "tid2eid": None, **changes})


def runner(monolithic: bool = False, naive: bool = False, ranks: int = 1) -> Any:
    return SimpleNamespace(
        _quant_method=SimpleNamespace(is_monolithic=monolithic),
        do_naive_dispatch_combine=naive,
        moe_config=SimpleNamespace(pcp_size=ranks),
    )


def refused(check: Any, *arguments: Any) -> bool:
    try:
        check(*arguments)
    except RoutingUnsupported:
        return True
    return False


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, False),
        ({"n_activated_experts": 8}, False),
        ({"n_activated_experts": 9}, True),
        ({"scoring_func": "softmax"}, True),
        ({"renormalize": False}, True),
    ],
)
def test_sizes(changes: dict[str, Any], wrong: bool) -> None:
    assert refused(support.check_sizes, moe(**changes)) == wrong


@pytest.mark.parametrize("mega", [False, True])
@pytest.mark.parametrize("base", ["TorchCompileWrapper", "Module"])
def test_compiled_mega_moe_alone_is_refused(mega: bool, base: str) -> None:
    model = type("Model", (type(base, (), {}),), {})
    wrong = mega and base.startswith("TorchCompile")
    assert refused(support.check_compilation, moe(use_mega_moe=mega), model) == wrong


@pytest.mark.parametrize("name", ["FusedTopKBiasRouter", "Simulator"])
@pytest.mark.parametrize("shared", [0, 1])
def test_only_the_biased_router_without_shared_experts(name: str, shared: int) -> None:
    router = type(name, (), {"num_fused_shared_experts": shared})()
    wrong = shared > 0 or name == "Simulator"
    assert refused(support.check_router, moe(), router) == wrong


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ({}, False),
        ({"monolithic": True}, True),
        ({"naive": True}, True),
        ({"ranks": 2}, True),
    ],
)
def test_layers(given: dict[str, Any], wrong: bool) -> None:
    one = runner(**given)
    for experts in (SimpleNamespace(runner=one), one):
        assert refused(support.check_layer, moe(experts=experts)) == wrong
        under_lora = SimpleNamespace(base_layer=experts, runner=runner(), **vars(runner()))
        assert refused(support.check_layer, moe(experts=under_lora)) == wrong
    support.check_layer(moe(use_mega_moe=True, experts=SimpleNamespace()))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("config", "vision"),
    [
        ({"vision_n_layers": 2}, True),
        ({"vision_n_layers": 0}, False),
        ({"vision_n_layers": None}, False),
        ({}, False),
        ({"vision_n_layers": 2, "vision_config": {}}, False),
    ],
)
def test_pipelines_under_the_v2_runner(ranks: int, config: dict[str, Any], vision: bool) -> None:
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=ranks),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(**config)),
    )
    assert support.has_vision(SimpleNamespace(**config)) == vision
    assert refused(support.check_v2_runner, vllm_config) == (vision and ranks > 1)


def test_the_probe_of_a_draft_is_answered_and_a_real_call_is_not() -> None:
    support.refuse_embeddings({"input_ids": 1})
    support.refuse_embeddings({"multimodal_embeddings": 1, "is_multimodal": 1})
    with pytest.raises(TypeError):
        support.refuse_embeddings({"multimodal_embeddings": None})


@pytest.mark.parametrize("images", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_is_mixed_in_steps_with_images_only(images: bool, bias: bool) -> None:
    before = context.set_current(context.StepContext(images))
    try:
        layer = moe() if bias else moe(gate=gate(**{select.BIAS_VL: None}))
        assert select.is_mixed(layer) == (images and bias)
    finally:
        context.set_current(before)


@pytest.mark.parametrize("count", [2, 4])
def test_there_is_one_id_for_each_row(count: int) -> None:
    """Also on a rank that has more rows, or fewer, than the ids of rank 0."""
    rows = torch.zeros(3, 6)
    with pytest.raises(select.MissingTokenIds, match=f"3 rows with {count} ids"):
        select.check_ids(moe(), rows, torch.zeros(count))
    with pytest.raises(select.MissingTokenIds, match="without token ids"):
        select.check_ids(moe(), rows, None)
    ids = torch.zeros(3)
    assert select.check_ids(moe(), rows, ids) is ids


@pytest.mark.parametrize("wanted", [None, torch.int32, torch.int64, torch.uint32])
def test_ids_have_the_dtype_that_the_layer_asks_for(wanted: torch.dtype | None) -> None:
    before = context.set_current(context.StepContext(True))
    try:
        token_ids = torch.tensor([5, layout.IMAGE_ID])
        _, ids = select.route(moe(), torch.randn(2, 6), token_ids, wanted)
        assert ids.dtype == (wanted or torch.int32)
    finally:
        context.set_current(before)


def test_the_mask_is_made_once_for_a_pass_and_again_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    mask = layout.image_token_mask
    monkeypatch.setattr(layout, "image_token_mask", lambda ids: made.append(1) or mask(ids))
    before = context.set_current(context.StepContext(True))
    try:
        first, second = torch.tensor([5, layout.IMAGE_ID]), torch.tensor([layout.END_ID, 5])
        for ids, expected in ((first, [False, True]), (first, [False, True])):
            assert select._image_mask(ids).tolist() == expected
        assert select._image_mask(second).tolist() == [True, False]
        assert len(made) == 2
    finally:
        context.set_current(before)


def test_warm_up_routes_each_kind_of_layer_with_few_rows_and_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed = gate(tid2eid=torch.zeros(9, 2, dtype=torch.int32))
    layers = [moe(), moe(), moe(gate=hashed), moe(use_mega_moe=True)]
    seen = []

    def route(layer: Any, logits: torch.Tensor, *_: Any) -> None:
        seen.append((layer.gate.tid2eid is not None, layer.use_mega_moe, len(logits)))

    monkeypatch.setattr(select, "route", route)
    select.warm_up(layers)
    kinds = [(False, False), (True, False), (False, True)]
    assert sorted(seen) == sorted((*kind, rows) for kind in kinds for rows in (1, MANY_ROWS))


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_on_rocm_text_rows_keep_every_bit(ids_dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    layer, logits = moe(), torch.randn(5, 6)
    token_ids = torch.tensor([7, layout.IMAGE_ID, 8, layout.START_ID, 9], dtype=torch.int32)
    image = torch.tensor([False, True, False, True, False])
    # What no rule gives, so that a row that is computed again is seen.
    stock = torch.full((5, 2), 0.123), torch.tensor([[5, 5]] * 5, dtype=ids_dtype)
    context.set_current(context.StepContext(True))
    try:
        found = select.replace_image_rows(layer, logits, token_ids, stock)
        wanted = select.route(layer, logits, token_ids, ids_dtype)
    finally:
        context.set_current(context.NO_IMAGES)
    for mine, theirs, routed in zip(found, stock, wanted, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine[~image], theirs[~image])
        assert torch.equal(mine[image], routed[image])
