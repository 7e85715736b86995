"""The start-up self-test, and the faults that it names: in vLLM's routing, runner and draft."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from checks import check, equal, raises
from rig_routing import Rig
from rig_selftest import cache, logged, model, refused, runner, runner_modules, start

from vision_exp.engine import context, sightings
from vision_exp.model import ranks, selftest


@check
def the_evidence_line_follows_a_step_with_an_image(rig: Rig) -> None:
    for module in runner_modules():
        for mega in (False, True):
            made = runner(rig, module, model(rig, mega=mega))
            first, second = start(made)
            equal("an image went through 2 layers" in first, True, first)
            equal("active pid=" in second and "routing=bias_vl" in second, True, second)
            image, end = made.steps
            equal(image.total_num_scheduled_tokens, len(made.ids))
            equal(end.finished_req_ids, {selftest.REQUEST})
            equal(made._vision_exp_blocks, {}, "the request is forgotten")
            (new,) = image.scheduled_new_reqs
            ids = [number for group in new.block_ids for number in group]
            equal((len(set(ids)), min(ids)), (len(ids), 1), "cache blocks")
            equal([len(group) for group in new.block_ids], [1, 5])


@check
def the_image_of_the_step_is_one_that_the_processor_could_write(rig: Rig) -> None:
    (new,) = selftest.step_with_image(rig.config, cache()).scheduled_new_reqs
    (feature,) = new.mm_features
    place, ids = feature.mm_position, new.prompt_token_ids
    equal((place.offset, place.offset + place.length), (0, len(ids) - 1))
    equal([ids[3], ids[-2], ids[-1]], [129257, 129261, 0], "START, END, text")
    equal(place.get_num_embeds(), 0, "no rows of the tower")
    with raises(ValueError, "2 cache blocks do not hold 64 tokens"):
        selftest.step_with_image(rig.config, cache(2))


@check
def the_step_fits_the_server_and_its_cache(rig: Rig) -> None:
    """Fewer rows where a step, a prompt or an image may not have as many; blocks for drafts."""

    def rows() -> int:
        (new,) = selftest.step_with_image(rig.config, cache()).scheduled_new_reqs
        return len(new.prompt_token_ids)

    def blocks() -> list[int]:
        (new,) = selftest.step_with_image(rig.config, cache()).scheduled_new_reqs
        return [len(group) for group in new.block_ids]

    equal((rows(), blocks()), (64, [1, 5]))
    with mock.patch.object(selftest.scheduling, "largest_chunk", lambda config: 20):
        equal(rows(), 20)
    with mock.patch.object(rig.config.model_config, "max_model_len", 30):
        equal(rows(), 29)
    with mock.patch.object(rig.config.model_config.hf_config, "vision_max_n_token", 40):
        equal(rows(), 40)
    ahead = SimpleNamespace(num_speculative_tokens=10, max_num_new_slots_for_drafting=0)
    with mock.patch.object(rig.config, "speculative_config", ahead):
        equal(blocks(), [1, 6])


@check
def a_draft_is_found_behind_its_graphs_in_either_runner(rig: Rig) -> None:
    model = torch.nn.Module()
    graph = SimpleNamespace(unwrap=lambda: SimpleNamespace(unwrap=lambda: model))
    for holder in ("drafter", "speculator"):
        for held in (model, graph):
            runner = SimpleNamespace(**{holder: SimpleNamespace(model=held)})
            equal(selftest._draft(runner) is model, True, holder)
    equal(selftest._draft(SimpleNamespace(drafter=None)), None)
    equal(selftest._draft(SimpleNamespace(speculator=SimpleNamespace(model="ngram"))), None)


@check
def an_mtp_draft_has_to_widen_the_images_rows(rig: Rig) -> None:
    block = sightings.Block("layers.43.mtp_block", 1, 2)
    other = sightings.Block("layers.44", 3, 4)
    for attention, attended, named in ((True, set(), True), (True, {2}, False), (False, set(), 0)):
        layers = sightings.Layers(target=(), draft=(block, other), attention=attention)
        seen = sightings.Sightings()
        seen.entered.update((1, 3))
        seen.attended.update(attended)
        told = selftest.judge(layers, seen)
        equal("layers.43.mtp_block (draft attention)" in told, bool(named), f"{told}")
        equal("layers.44 (draft attention)" in told, False, f"{told}")


@check
def a_router_that_is_bypassed_is_named(rig: Rig) -> None:
    """Its selection calls another method than the one that is wrapped."""
    target = model(rig)
    router = target.layers[1].ffn.experts.router
    stock = partial(type(router)._compute_routing, router)
    router.select_experts = lambda *args, **kwargs: stock(
        kwargs["hidden_states"], kwargs["router_logits"], None, input_ids=kwargs.get("input_ids")
    )
    refused(rig, target, "layers.1 (routing) on rank 0")


@check
def mega_moe_that_calls_the_function_through_its_module_is_named(rig: Rig) -> None:
    from vllm.model_executor.layers.fused_moe.router import fused_topk_bias_router as module

    with mock.patch.dict(vars(rig.model), fused_topk_bias=module.fused_topk_bias):
        refused(rig, model(rig, mega=True), "layers.0 (routing), layers.1 (routing) on rank 0")


@check
def a_layer_class_with_its_own_forward_is_named(rig: Rig) -> None:
    target = model(rig)
    moe = target.layers[0].ffn
    own = type("FusedMoE", (type(moe),), {"forward": lambda self, hidden, ids: hidden})
    object.__setattr__(moe, "__class__", own)
    refused(rig, target, "layers.0 (routing) on rank 0")


@check
def a_layer_that_gets_other_rows_ids_is_named(rig: Rig) -> None:
    target = model(rig)
    moe = target.layers[1].ffn
    text = moe.forward
    moe.forward = lambda hidden, ids: text(hidden, torch.zeros_like(ids))
    refused(rig, target, "layers.1 (routing: no image row among its token ids)")


@check
def a_runner_that_goes_around_the_step_is_named(rig: Rig) -> None:
    target = model(rig)
    made = runner(rig, runner_modules()[0], target)
    made.execute_model = lambda output, intermediate=None: None
    refused(rig, target, "layers.0 (routing), layers.1 (routing)", made)


@check
def a_draft_is_tested_too(rig: Rig) -> None:
    target, draft = model(rig), model(rig)
    made = runner(rig, runner_modules()[1], target, draft)
    equal("through 4 layers" in start(made)[0], True)
    made.forwards = [target]
    refused(rig, target, "layers.0 (draft routing: it did not run)", made)
    made.forwards = [target, draft]
    router = draft.layers[0].ffn.experts.router
    router._compute_routing = partial(type(router)._compute_routing, router)
    refused(rig, target, "layers.0 (draft routing) on rank 0", made)


@check
def a_step_that_fails_is_told_before_it_is_raised(rig: Rig) -> None:
    made = runner(rig, runner_modules()[0], model(rig))

    def broken(output: Any, intermediate: Any = None) -> None:
        raise ZeroDivisionError("a kernel")

    made.execute_model = broken
    with logged() as lines:
        with raises(selftest.SelfTestError, "self-test failed: ZeroDivisionError: a kernel"):
            start(made)
        equal(len(lines()), 1)


@check
def the_ranks_that_did_not_see_it_are_named_together(rig: Rig) -> None:
    selftest.refuse([[], []])
    with raises(selftest.SelfTestError, "a, b on rank 1, 3; c on rank 2"):
        selftest.refuse([[], ["a", "b"], ["c"], ["a", "b"]])


@check
def every_rank_of_the_server_is_asked(rig: Rig) -> None:
    from vllm.distributed import parallel_state

    asked: list[Any] = []
    gather = mock.patch.object(ranks, "gather", lambda value, group, size: asked.append(size))
    sizes = {"get_world_group": 8, "get_tp_group": 2}
    groups = {
        name: lambda size=size: SimpleNamespace(cpu_group=None, world_size=size)
        for name, size in sizes.items()
    }
    with gather, mock.patch.multiple(parallel_state, **groups):
        ranks.gather_all(rig.config, "mine")
        with mock.patch.object(rig.config.parallel_config, "enable_elastic_ep", True):
            ranks.gather_all(rig.config, "mine")
    equal(asked, [8, 2], "ranks asked; of an elastic server those of one replica")


@check
def text_steps_make_no_notes(rig: Rig) -> None:
    made = runner(rig, runner_modules()[0], model(rig))
    start(made)
    output = selftest.step_with_image(rig.config, cache())
    output.scheduled_new_reqs[0].mm_features = []
    made.execute_model(output)
    equal(context.current().seen, None)
    equal(isinstance(getattr(made, "_vision_exp_layers", None), sightings.Layers), True)


@check
def transfers_are_off_during_the_step_and_on_again_after_it(rig: Rig) -> None:
    from vllm.distributed.ec_transfer import ec_transfer_state as rows
    from vllm.distributed.kv_transfer import kv_transfer_state as kv

    made = runner(rig, runner_modules()[0], model(rig))
    made.kv_connector = mock.Mock()
    during: list[Any] = []
    execute = made.execute_model

    def execute_model(*args: Any) -> Any:
        during.append((kv.has_kv_transfer_group(), rows.has_ec_transfer()))
        return execute(*args)

    made.execute_model = execute_model
    agents = mock.patch.multiple(kv, _KV_CONNECTOR_AGENT="kv")
    with agents, mock.patch.multiple(rows, _EC_CONNECTOR_AGENT="rows"):
        start(made)
        equal(during, [(False, False)] * 2)
        equal((kv._KV_CONNECTOR_AGENT, rows._EC_CONNECTOR_AGENT), ("kv", "rows"))
    equal([call.args for call in made.kv_connector.set_disabled.mock_calls], [(True,), (False,)])


@check
def a_worker_that_computes_no_text_is_not_tested(rig: Rig) -> None:
    for target, name, value in (
        (rig.config, "ec_transfer_config", SimpleNamespace(is_ec_consumer=False)),
        (selftest.registry, "images_off", lambda config: True),
    ):
        made = runner(rig, runner_modules()[0], model(rig))
        with mock.patch.object(target, name, value):
            (line,) = start(made)
        equal(("active pid=" in line, made.steps), (True, []))
