"""The step's images on real scheduler messages, and the graph modes that both runners then take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from checks import check, equal
from rig_routing import Rig
from vllm.config import CUDAGraphMode
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from vision_exp.engine import context
from vision_exp.engine.spans import ImageSpan


def new_request(name: str, computed: int, *images: tuple[int, int]) -> NewRequestData:
    features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=f"{name}{offset}",
            mm_position=PlaceholderRange(offset=offset, length=length),
        )
        for offset, length in images
    ]
    return NewRequestData(
        req_id=name,
        prompt_token_ids=None,
        mm_features=features,
        sampling_params=None,
        pooling_params=None,
        block_ids=([],),
        num_computed_tokens=computed,
        lora_request=None,
    )


def scheduled(
    counts: dict[str, int],
    new: list[NewRequestData] = (),
    cached: dict[str, int] | None = None,
    finished: set[str] = frozenset(),
) -> SchedulerOutput:
    requests = CachedRequestData.make_empty()
    requests.req_ids = list(cached or {})
    requests.num_computed_tokens = list((cached or {}).values())
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = list(new)
    output.scheduled_cached_reqs = requests
    output.num_scheduled_tokens = counts
    output.total_num_scheduled_tokens = sum(counts.values())
    output.finished_req_ids = set(finished)
    return output


class Runner:
    """A runner's life as the wrapped methods see it; records what was current when."""

    def __init__(self, module: Any, config: Any) -> None:
        self.vllm_config, self.encoder_cache = config, {}
        self.methods = module.GPUModelRunner
        self.during: list[context.StepContext] = []

    def call(self, name: str, *args: Any) -> context.StepContext:
        """Run the wrapper that is installed on the real class over a body that only records."""
        wrapper = getattr(self.methods, name).__dict__["__vision_exp_wrapper__"]
        body = mock.Mock(
            side_effect=lambda *args: self.during.append(context.current()) or "output"
        )
        equal(wrapper(body, self, *args), "output")
        return self.during[-1]


def runners(rig: Rig, config: Any = None) -> list[Runner]:
    from vllm.v1.worker import gpu_model_runner as v1
    from vllm.v1.worker.gpu import model_runner as v2

    return [Runner(module, config or rig.config) for module in (v1, v2)]


@check
def image_rows_follow_the_scheduled_ranges(rig: Rig) -> None:
    for runner in runners(rig):
        # Placeholder 10..29: pad at 10, START at 11, END at 29.
        images = runner.call(
            "execute_model", scheduled({"a": 10}, [new_request("a", 0, (10, 20), (40, 9))])
        )
        equal(images.has_image_rows, False, "ends before the pad")
        equal(images.spans, {"a": (ImageSpan(10, 30, 1), ImageSpan(40, 49, 3))})
        equal(context.current().has_image_rows, True, "a draft reads one token further")
        for start, count, target, draft in (
            (10, 1, True, True),  # a pad alone
            (29, 1, True, True),  # END alone
            (30, 9, False, False),
            (30, 10, False, True),
            (40, 1, True, True),
            (49, 1, False, False),
        ):
            images = runner.call("execute_model", scheduled({"a": count}, cached={"a": start}))
            equal(images.has_image_rows, target, f"{start}+{count}")
            equal(context.current().has_image_rows, draft, f"draft of {start}+{count}")
            equal(context.current().spans, images.spans)


@check
def other_requests_and_ends_of_requests(rig: Rig) -> None:
    for runner in runners(rig):
        runner.call("execute_model", scheduled({"a": 5}, [new_request("a", 0, (10, 20))]))
        # Text rows of another request; `a` waits.
        images = runner.call("execute_model", scheduled({"b": 30}, [new_request("b", 0)]))
        equal(images, context.StepContext())
        # Both in one step, image rows cached by the encoder: nothing else tells them.
        images = runner.call(
            "execute_model", scheduled({"b": 1, "a": 25}, cached={"b": 30, "a": 5})
        )
        equal((images.has_image_rows, list(images.spans)), (True, ["a"]))
        # Preempted, then resumed from the start, by both runners' kinds of message.
        images = runner.call("execute_model", scheduled({"a": 12}, cached={"a": 0}))
        equal(images.has_image_rows, True)
        images = runner.call("execute_model", scheduled({"a": 12}, [new_request("a", 0, (10, 20))]))
        equal(images.has_image_rows, True)
        # The request sent again with other contents, as for streamed input.
        again = scheduled({"a": 12}, [new_request("a", 0)])
        equal(runner.call("execute_model", again), context.StepContext())
        again = scheduled({"a": 12}, [new_request("a", 0, (10, 20))])
        equal(runner.call("execute_model", again).has_image_rows, True)
        # The same id again in the step that ends the request, now without images.
        images = runner.call(
            "execute_model", scheduled({"a": 12}, [new_request("a", 0)], finished={"a"})
        )
        equal(images, context.StepContext())
        equal(runner._vision_exp_blocks, {})


@check
def dummy_runs_and_captures_have_no_images(rig: Rig) -> None:
    for runner in runners(rig):
        for name in ("_dummy_run", "capture_model"):
            context.set_current(context.StepContext(True))
            equal(runner.call(name), context.NO_IMAGES, name)
            equal(context.current(), context.NO_IMAGES, name)


@check
def other_models_with_images_are_left_alone(rig: Rig) -> None:
    for runner in runners(rig, rig.text_config()):
        context.set_current(context.StepContext(True))
        images = runner.call("execute_model", scheduled({"a": 30}, [new_request("a", 0, (10, 20))]))
        equal((images, context.current()), (context.NO_IMAGES, context.NO_IMAGES))


def dispatcher_v1(rig: Rig) -> Any:
    """vLLM's own V1 dispatcher with keys for decode and mixed batches, as after a capture."""
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    config = rig.config.compilation_config
    sizes = [1, 2, 4, 8, 16, 32]
    changes = {"cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": sizes[-1]}
    with mock.patch.multiple(config, cudagraph_mode=CUDAGraphMode.FULL, **changes):
        config.post_init_cudagraph_sizes()
        dispatcher = CudagraphDispatcher(rig.config)
        dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL, 1)
    dispatcher.compilation_config = SimpleNamespace(
        max_cudagraph_capture_size=32, cudagraph_specialize_lora=False
    )
    return dispatcher


@check
def v1_dispatcher_leaves_graphs_for_image_steps(rig: Rig) -> None:
    dispatcher = dispatcher_v1(rig)
    full, none = CUDAGraphMode.FULL, CUDAGraphMode.NONE
    for keywords in (
        {},
        {"valid_modes": {full, none}},
        {"invalid_modes": {CUDAGraphMode.PIECEWISE}},
    ):
        mode, padded = dispatcher.dispatch(num_tokens=5, **keywords)
        equal((mode, padded.num_tokens), (full, 8))
        with rig.running(images=True):
            mode, padded = dispatcher.dispatch(num_tokens=5, **keywords)
        equal((mode, padded.num_tokens), (none, 5))
    with rig.running(images=True):
        mode, _ = dispatcher.dispatch(num_tokens=5, invalid_modes={full})
    equal(mode, none)


def dispatcher_v2() -> Any:
    """vLLM's own V2 graph manager with one FULL graph for up to 8 tokens."""
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

    manager = CudaGraphManager.__new__(CudaGraphManager)
    graph = BatchExecutionDescriptor(cg_mode=CUDAGraphMode.FULL, num_tokens=8, num_reqs=8)
    manager._graphs_captured = True
    manager._resolve_effective_loras = lambda count: count
    manager._candidates = {(tokens, 0): [graph] for tokens in range(1, 9)}
    return manager


def dispatch_v2(manager: Any, other_ranks_modes: list[CUDAGraphMode] = ()) -> Any:
    """vLLM's own dispatch of 5 tokens in 5 requests, with data-parallel peers that also want 5."""
    from vllm.v1.worker.gpu import dp_utils

    def all_reduce(tensor: torch.Tensor, group: Any) -> None:
        for rank, mode in enumerate(other_ranks_modes, start=1):
            tensor[:, rank] = tensor[:, 0]
            tensor[1, rank] = mode.value

    group = mock.patch.object(dp_utils, "get_dp_group", lambda: SimpleNamespace(cpu_group=None))
    reduce = mock.patch.object(dp_utils.dist, "all_reduce", all_reduce)
    with group, reduce:
        found, _ = dp_utils.dispatch_cg_and_sync_dp(manager, 5, 5, 1, 1 + len(other_ranks_modes), 0)
    return found


@check
def v2_dispatch_leaves_graphs_for_image_steps(rig: Rig) -> None:
    manager = dispatcher_v2()
    full, none = CUDAGraphMode.FULL, CUDAGraphMode.NONE
    found = dispatch_v2(manager)
    equal((found.cg_mode, found.num_tokens), (full, 8))
    with rig.running(images=True):
        found = dispatch_v2(manager)
        equal((found.cg_mode, found.num_tokens, found.num_reqs), (none, 5, 5))
        found = dispatch_v2(manager, [full, full])
        equal((found.cg_mode, found.num_tokens), (none, 5), "others want a graph")
    found = dispatch_v2(manager, [full, none])
    equal((found.cg_mode, found.num_tokens), (none, 5), "another rank has image rows")
    found = dispatch_v2(manager, [full, full])
    equal((found.cg_mode, found.num_tokens), (full, 8))


@check
def v1_ranks_agree_on_leaving_graphs(rig: Rig) -> None:
    from vllm.v1.worker import dp_utils

    parallel = SimpleNamespace(
        data_parallel_size=2,
        data_parallel_rank=0,
        num_ubatches=1,
        disable_nccl_for_dp_synchronization=True,
    )
    for peer, agreed in ((CUDAGraphMode.NONE, 0), (CUDAGraphMode.FULL, CUDAGraphMode.FULL.value)):

        def reduced(own=peer, **values: Any) -> torch.Tensor:
            columns = [[5, 8, 0, values["cudagraph_mode"]], [5, 8, 0, own.value]]
            return torch.tensor(columns, dtype=torch.int32).T

        with mock.patch.object(dp_utils, "_run_ar", reduced):
            _, _, mode = dp_utils.coordinate_batch_across_dp(
                num_tokens_unpadded=5,
                allow_microbatching=False,
                parallel_config=parallel,
                num_tokens_padded=8,
                cudagraph_mode=CUDAGraphMode.FULL.value,
            )
        equal(mode, agreed)


@check
def every_graph_choice_goes_through_the_two_dispatchers(rig: Rig) -> None:
    """No class of the drafts overrides what is wrapped."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
    from vllm.v1.worker.gpu.spec_decode.autoregressive import cudagraph_utils as autoregressive
    from vllm.v1.worker.gpu.spec_decode.dflash import cudagraph as dflash

    for module in (autoregressive, dflash):
        managers = [
            value
            for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, CudaGraphManager)
        ]
        equal(len(managers) >= 2, True, module.__name__)
        for manager in managers:
            equal(manager.dispatch is CudaGraphManager.dispatch, True, manager.__name__)
