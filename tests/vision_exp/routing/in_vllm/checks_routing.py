"""Which rows were routed by whom in the real MoE modules."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import torch
from checks import check, equal, raises
from rig_routing import Rig, batch, expected, same

from vision_exp.engine import context
from vision_exp.routing import hooks, select, support


@check
def parameter_exists_in_vision_layers_only(rig: Rig) -> None:
    for layer in (0, 3):
        names = dict(rig.moe(layer).named_parameters())
        bias = names[f"gate.{select.BIAS_VL}"]
        equal((bias.dtype, tuple(bias.shape)), (torch.float32, (256,)))
        text = dict(rig.moe(layer, text=True).named_parameters())
        equal([name for name in text if name.endswith("_vl")], [])
        equal("gate.tid2eid" in names, layer == 0)
        # A correction bias in a hash layer would send stock routing down its unhashed fast path.
        equal("gate.e_score_correction_bias" in names, layer == 3)


@check
def mixed_batch_routes_image_rows_by_bias_vl(rig: Rig) -> None:
    for mega in (False, True):
        for layer in (0, 2, 3):
            moe = rig.moe(layer, mega=mega)
            dtype = torch.int64 if mega else torch.int32
            hidden, ids, mask = batch(40, [0, 3, 4, 5, 6, 7, 39], dtype)
            found = rig.forward(moe, hidden, ids, images=True)
            same(found, expected(moe, hidden, ids, mask))
            equal(rig.stock, [], "vLLM's router in a step with image rows")
            equal(found[1].dtype, dtype if mega else torch.int32)


@check
def only_image_rows_depend_on_bias_vl(rig: Rig) -> None:
    for layer in (0, 3):
        moe = rig.moe(layer)
        hidden, ids, mask = batch(64, list(range(10, 40)))
        before = rig.forward(moe, hidden, ids, images=True)[1]
        getattr(moe.gate, select.BIAS_VL).data.neg_()
        after = rig.forward(moe, hidden, ids, images=True)[1]
        changed = (before != after).any(1)
        equal(bool(changed[mask].all()), True, "every image row follows bias_vl")
        equal(bool(changed[~mask].any()), False, "no text row follows bias_vl")
        if layer == 0:
            moe.gate.tid2eid.data.add_(1).remainder_(256)
        else:
            moe.gate.e_score_correction_bias.data.neg_()
        text = rig.forward(moe, hidden, ids, images=True)[1]
        changed = (text != after).any(1)
        equal(bool(changed[~mask].all()), True, "every text row follows the table or text bias")
        equal(bool(changed[mask].any()), False, "no image row follows the table or text bias")


@check
def batch_without_images_takes_vllms_router(rig: Rig) -> None:
    for mega in (False, True):
        for layer in (0, 3):
            moe = rig.moe(layer, mega=mega)
            hidden, ids, mask = batch(12, [], torch.int64 if mega else torch.int32)
            # Sentinel ids without scheduled image rows: a stale buffer tail, for example.
            ids[5] = 129258 if layer else ids[5]
            with mock.patch.object(select, "mm_topk", side_effect=AssertionError):
                found = rig.forward(moe, hidden, ids, images=False)
            equal(rig.stock, [{"rows": 12, "hash": layer == 0}])
            same(found, expected(moe, hidden, ids, mask))


@check
def text_only_checkpoint_is_untouched_in_any_step(rig: Rig) -> None:
    for layer in (0, 3):
        moe = rig.moe(layer, text=True)
        hidden, ids, _ = batch(6, [])
        rig.forward(moe, hidden, ids, images=True)
        equal(rig.stock, [{"rows": 6, "hash": layer == 0}])
        equal("_compute_routing" in vars(moe.experts.router), False)


@check
def capture_keeps_vllms_router(rig: Rig) -> None:
    moe = rig.moe(3)
    hidden, ids, _ = batch(4, [1])
    initialized = mock.patch.object(torch.cuda, "is_initialized", lambda: True)
    capturing = mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True)
    with initialized, capturing:
        rig.forward(moe, hidden, ids, images=True)
    equal(len(rig.stock), 1)


@check
def image_rows_without_their_ids_are_an_error(rig: Rig) -> None:
    hidden, ids, _ = batch(8, [2])
    for mega in (False, True):
        moe = rig.moe(3, mega=mega)
        with rig.running(images=True):
            with raises(select.MissingTokenIds, "without token ids"):
                moe(hidden, None)
            with raises(select.MissingTokenIds, "8 rows with 7 ids"):
                moe(hidden, ids[:7])
    # Hidden states that something gathered between the layer's forward and its router.
    router = rig.moe(3).experts.router
    gathered = hidden.repeat(2, 1), torch.randn(16, 256)
    with rig.running(images=True), raises(select.MissingTokenIds, "16 rows with 8 ids"):
        router.select_experts(hidden_states=gathered[0], router_logits=gathered[1], input_ids=ids)


@check
def sequence_parallel_shards_route_alike(rig: Rig) -> None:
    moe = rig.moe(0)
    hidden, ids, mask = batch(22, [5, 6, 7, 12, 13])
    whole = rig.forward(moe, hidden, ids, images=True)
    padded = torch.nn.functional.pad(hidden, (0, 0, 0, 2)), torch.nn.functional.pad(ids, (0, 2))
    shards = []
    for rank in range(4):  # 22 rows padded to 24, as vLLM's sp_shard cuts them for 4 ranks
        rows = slice(rank * 6, rank * 6 + 6)
        shards.append(rig.forward(moe, padded[0][rows], padded[1][rows], images=True)[1])
    equal(torch.equal(torch.cat(shards)[:22], whole[1]), True)
    equal(bool(mask.any()), True)


@check
def mask_is_made_once_per_forward_pass(rig: Rig) -> None:
    layers = [rig.moe(layer) for layer in (0, 3)]
    hidden, ids, mask = batch(9, [4])
    calls = []
    made = select.layout.image_token_mask
    counted = mock.patch.object(
        select.layout, "image_token_mask", lambda ids: calls.append(1) or made(ids)
    )
    with counted, rig.running(images=True):
        for layer in layers:
            layer(hidden, ids)
        equal(len(calls), 1)
        layers[0](hidden, ids.clone())
        equal(len(calls), 2, "other ids, other mask")
        layers[0](hidden, ids)
        equal(len(calls), 3)
        context.set_current(context.StepContext(True))
        layers[0](hidden, ids)
        equal(len(calls), 4, "other step, other mask")
    equal(bool(mask.any()), True)


@check
def unsupported_paths_are_refused(rig: Rig) -> None:
    moe = rig.moe(3)
    support.check_layer(moe)
    runner = moe.experts
    refused = support.RoutingUnsupported
    method = runner.routed_experts.quant_method
    with mock.patch.object(method, "is_monolithic", True, create=True):
        with raises(refused, "selects experts itself", "--moe-backend"):
            support.check_layer(moe)
        with rig.running(images=True), raises(refused, "selects experts itself"):
            moe(*batch(3, [1])[:2])
    with mock.patch.object(runner.moe_config.moe_parallel_config, "dp_size", 2):
        with raises(refused, "without their token ids", "--all2all-backend"):
            support.check_layer(moe)
        with mock.patch.object(type(method), "supports_internal_mk", True):
            support.check_layer(moe)  # such a kernel sends rows after their selection
    parallel = runner.moe_config.moe_parallel_config
    with mock.patch.object(parallel, "pcp_size", 2), raises(refused, "prefill-context-parallel"):
        support.check_layer(moe)
    compiled = type("Compiled", (type("TorchCompileWithNoGuardsWrapper", (), {}),), {})
    with mock.patch.object(rig.model, "DeepseekV4Model", compiled):
        rig.moe(3)
        with raises(refused, "compiled"):
            rig.moe(3, mega=True)
    config = rig.config.model_config.hf_config
    for key, value in (("scoring_func", "sigmoid"), ("norm_topk_prob", False)):
        with mock.patch.object(config, key, value), raises(refused, str(value)):
            rig.moe(3)


@check
def loading_checks_every_layer(rig: Rig) -> None:
    from vllm.v1.worker import gpu_model_runner as v1
    from vllm.v1.worker.gpu import model_runner as v2

    moe, hashed = rig.moe(3), rig.moe(0)
    equal(hashed.gate.tid2eid is None, False)
    parallel = SimpleNamespace(pipeline_parallel_size=1)
    config = SimpleNamespace(parallel_config=parallel, model_config=rig.config.model_config)
    runner = SimpleNamespace(vllm_config=config)
    for wrapper in (hooks._load_model, hooks._load_model_v2):
        with mock.patch.object(select, "mm_topk", wraps=select.mm_topk) as routed:
            equal(wrapper(lambda runner: "loaded", runner), "loaded")
        kinds = {call.kwargs["tid2eid"] is not None for call in routed.call_args_list}
        equal(kinds, {False, True}, "both kinds of layer are compiled before the first request")
        method = moe.experts.routed_experts.quant_method
        refused = raises(support.RoutingUnsupported, moe.prefix)
        with mock.patch.object(method, "is_monolithic", True), refused:
            wrapper(lambda runner: "loaded", runner)
    parallel.pipeline_parallel_size = 2
    equal(hooks._load_model(lambda runner: "loaded", runner), "loaded")
    with raises(support.RoutingUnsupported, "V2 model runner", "VLLM_USE_V2_MODEL_RUNNER=0"):
        hooks._load_model_v2(lambda runner: "loaded", runner)
    config.model_config = rig.text_config().model_config
    equal(hooks._load_model_v2(lambda runner: "loaded", runner), "loaded")
    for module in (v1, v2):
        equal(hasattr(module.GPUModelRunner.load_model, "__wrapped__"), True, module.__name__)
