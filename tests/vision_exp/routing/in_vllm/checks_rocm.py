"""Which rows were routed by whom in the real MoE modules of amd/, on a stand-in for its platform.

Not run on AMD hardware.
"""

from __future__ import annotations

from unittest import mock

import checks_drafts
import torch
from checks import check, equal, raises
from rig_routing import Rig, batch, expected, same

from vision_exp.routing import select, support


@check
def rocm_replaces_image_rows_only(rig: Rig) -> None:
    with rig.on_rocm():
        for layer in (0, 2, 3):
            moe = rig.moe(layer)
            hidden, ids, mask = batch(40, [0, 3, 4, 5, 6, 7, 39])
            stock = rig.forward(moe, hidden, ids, images=False)
            found = rig.forward(moe, hidden, ids, images=True)
            same(found, expected(moe, hidden, ids, mask))
            equal(rig.stock, [{"rows": 40, "hash": layer < 3}], "vLLM's own operator, all rows")
            for mine, theirs in zip(found, stock, strict=True):
                equal(torch.equal(mine[~mask], theirs[~mask]), True, "text rows, bit for bit")
                equal((mine.dtype, mine.shape), (theirs.dtype, theirs.shape))
                equal(bool((mine[mask] != theirs[mask]).any()), True, "image rows choose anew")


@check
def rocm_keeps_the_order_of_text_rows_experts(rig: Rig) -> None:
    # An operator that breaks ties, or orders its choice, by another rule than mm_topk does.
    with rig.on_rocm():
        moe = rig.moe(3)
        hidden, ids, mask = batch(24, [1, 2, 23])
        router = moe.experts.router._compute_routing
        inner = router.args[0]

        def backwards(*args, **kwargs):
            weights, experts = inner(*args, **kwargs)
            return weights.flip(1), experts.flip(1)

        moe.experts.router._compute_routing = type(router)(router.func, backwards, *router.args[1:])
        stock = rig.forward(moe, hidden, ids, images=False)
        found = rig.forward(moe, hidden, ids, images=True)
        for mine, theirs in zip(found, stock, strict=True):
            equal(torch.equal(mine[~mask], theirs[~mask]), True, "text rows, bit for bit")


@check
def rocm_text_checkpoint_is_untouched(rig: Rig) -> None:
    with rig.on_rocm():
        moe = rig.moe(3, text=True)
        hidden, ids, _ = batch(6, [])
        rig.forward(moe, hidden, ids, images=True)
        equal(rig.stock, [{"rows": 6, "hash": False}])
        equal("_compute_routing" in vars(moe.experts.router), False)
        equal(hasattr(moe, "use_mega_moe"), False)
        equal([name for name, _ in moe.named_parameters() if name.endswith("_vl")], [])


@check
def rocm_image_rows_without_their_ids_are_an_error(rig: Rig) -> None:
    with rig.on_rocm():
        moe = rig.moe(3)
        hidden, _, _ = batch(8, [2])
        with rig.running(images=True), raises(select.MissingTokenIds, "without token ids"):
            moe(hidden, None)


@check
def rocm_kernels_that_select_inside_are_refused_before_weights_load(rig: Rig) -> None:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    refused = support.RoutingUnsupported
    monolithic = mock.patch.object(UnquantizedFusedMoEMethod, "is_monolithic", True)
    with rig.on_rocm():
        with monolithic, raises(refused, "selects experts itself", "--moe-backend"):
            rig.moe(3)
        name = "FusedMoEFactory" if hasattr(rig.model, "FusedMoEFactory") else "FusedMoE"
        make = getattr(rig.model, name)

        def with_shared(*args, **kwargs):
            made = make(*args, **kwargs)
            made.router.num_fused_shared_experts = 1
            return made

        with (
            mock.patch.object(rig.model, name, with_shared),
            raises(refused, "1 fused shared", "VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS"),
        ):
            rig.moe(3)


@check
def rocm_drafts_route_image_rows(rig: Rig) -> None:
    with rig.on_rocm():
        checks_drafts.mtp_draft_hands_its_ids_on(rig)
        checks_drafts.mtp_draft_keeps_its_ids_under_the_v1_proposer(rig)
        if rig.dspark is not None:
            checks_drafts.dspark_draft_routes_image_rows(rig)
