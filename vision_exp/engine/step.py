"""Which rows of the batch now running are image rows, known on the host without a synchronisation.

Image blocks come from the placeholders that the scheduler sends with each request, and the rows
that run from the token ranges it schedules. So every rank of one scheduler computes the same
answer, and an image whose encoder output is cached counts like any other.

CUDA graphs: captured graphs hold vLLM's own router and a replay cannot choose another one. A step
with image rows therefore asks both graph dispatchers (V1 `CudagraphDispatcher`, V2
`CudaGraphManager`; target, drafts and breakable graphs all go through them) for mode NONE, the mode
of a batch larger than every captured size. Data-parallel ranks run with the smallest mode that any
of them asked for, in every release, so the other ranks leave graphs in the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vision_exp import layout, patching

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model(scheduler_output)",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._dummy_run",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.capture_model",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.model_config",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model(scheduler_output)",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner._dummy_run",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.capture_model",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.model_config",
    "vllm.v1.cudagraph_dispatcher:CUDAGraphMode",
    "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher.dispatch("
    "num_tokens, valid_modes, invalid_modes)",
    "vllm.v1.worker.gpu.cudagraph_utils:CUDAGraphMode",
    "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager.dispatch(num_reqs, num_tokens)",
    "vllm.v1.worker.gpu.cudagraph_utils:BatchExecutionDescriptor.cg_mode",
    "vllm.v1.worker.gpu.cudagraph_utils:BatchExecutionDescriptor.num_tokens",
    "vllm.v1.worker.gpu.cudagraph_utils:BatchExecutionDescriptor.num_reqs",
    "vllm.v1.core.sched.output:SchedulerOutput.finished_req_ids",
    "vllm.v1.core.sched.output:SchedulerOutput.scheduled_new_reqs",
    "vllm.v1.core.sched.output:SchedulerOutput.scheduled_cached_reqs",
    "vllm.v1.core.sched.output:SchedulerOutput.num_scheduled_tokens",
    "vllm.v1.core.sched.output:NewRequestData.req_id",
    "vllm.v1.core.sched.output:NewRequestData.num_computed_tokens",
    "vllm.v1.core.sched.output:CachedRequestData.req_ids",
    "vllm.v1.core.sched.output:CachedRequestData.num_computed_tokens",
    "vllm.v1.core.sched.output:NewRequestData.mm_features",
    "vllm.multimodal.inputs:MultiModalFeatureSpec.mm_position",
    "vllm.multimodal.inputs:PlaceholderRange.offset",
    "vllm.multimodal.inputs:PlaceholderRange.length",
)


@dataclass(frozen=True)
class ImageSpan:
    """Prompt positions of one image's START and END, both inclusive; leading pads excluded."""

    start: int
    end: int


@dataclass(frozen=True)
class StepImages:
    """What one step knows about images.

    has_image_rows: a row that runs now lies in an image block, leading pads included.
    spans: request id -> every image span of that request, for scheduled requests that have any.
    """

    has_image_rows: bool = False
    spans: Mapping[str, tuple[ImageSpan, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Placeholder:
    """Prompt positions of one image's block, leading pads included, both inclusive."""

    first: int
    last: int

    @property
    def span(self) -> ImageSpan:
        return ImageSpan(self.first + layout.leading_pads(self.first), self.last)

    def overlaps(self, start: int, stop: int) -> bool:
        """True if a position of the block lies in [start, stop)."""
        return self.first < stop and self.last >= start


Placeholders = dict[str, tuple[Placeholder, ...]]

NO_IMAGES = StepImages()
_current = NO_IMAGES


def current() -> StepImages:
    """The images of what runs now; NO_IMAGES before the first step, in dummy runs and captures."""
    return _current


def set_current(images: StepImages) -> StepImages:
    """Make `images` current and return what was current before."""
    global _current
    before, _current = _current, images
    return before


def install() -> None:
    """Wrap both model runners and both CUDA graph dispatchers, now or when vLLM imports them."""
    patching.when_imported("vllm.v1.worker.gpu_model_runner", _wrap_runner)
    patching.when_imported("vllm.v1.worker.gpu.model_runner", _wrap_runner)
    patching.when_imported("vllm.v1.cudagraph_dispatcher", _wrap_dispatcher_v1)
    patching.when_imported("vllm.v1.worker.gpu.cudagraph_utils", _wrap_dispatcher_v2)


def observe(placeholders: Placeholders, scheduler_output: Any) -> tuple[StepImages, StepImages]:
    """Images of a step: (for the target, for a draft that runs after it).

    placeholders: image blocks by request id, of every request seen so far; updated in place.
    An MTP draft reads each row's successor, so its rows reach one position further.
    """
    for request_id in scheduler_output.finished_req_ids:
        placeholders.pop(request_id, None)
    new = scheduler_output.scheduled_new_reqs
    for request in new:
        placeholders.pop(request.req_id, None)
        if request.mm_features:
            placeholders[request.req_id] = tuple(_placeholder(f) for f in request.mm_features)
    if not placeholders:
        return NO_IMAGES, NO_IMAGES

    cached = scheduler_output.scheduled_cached_reqs
    starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    starts.update((request.req_id, request.num_computed_tokens) for request in new)
    spans: dict[str, tuple[ImageSpan, ...]] = {}
    target = draft = False
    for request_id, count in scheduler_output.num_scheduled_tokens.items():
        own = placeholders.get(request_id)
        if own is None:
            continue
        spans[request_id] = tuple(block.span for block in own)
        start = starts[request_id]
        target = target or any(block.overlaps(start, start + count) for block in own)
        draft = draft or any(block.overlaps(start, start + count + 1) for block in own)
    return StepImages(target, spans), StepImages(draft, spans)


def _placeholder(feature: Any) -> Placeholder:
    place = feature.mm_position
    return Placeholder(place.offset, place.offset + place.length - 1)


def _wrap_runner(module: Any) -> None:
    runner = module.GPUModelRunner
    patching.wrap(runner, "execute_model", _execute_model)
    patching.wrap(runner, "_dummy_run", _without_images)
    patching.wrap(runner, "capture_model", _without_images)


def _execute_model(
    original: Callable[..., Any], runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    target, draft = NO_IMAGES, NO_IMAGES
    placeholders = _placeholders_of(runner)
    if placeholders is not None:
        target, draft = observe(placeholders, scheduler_output)
    set_current(target)
    output = original(runner, scheduler_output, *args, **kwargs)
    # Until the next step only the draft runs.
    set_current(draft)
    return output


def _without_images(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    set_current(NO_IMAGES)
    return original(runner, *args, **kwargs)


def _placeholders_of(runner: Any) -> Placeholders | None:
    """The runner's image blocks by request; None if it runs another kind of checkpoint."""
    from vision_exp.config import is_vision_exp

    if not hasattr(runner, "_vision_exp_placeholders"):
        vision = is_vision_exp(runner.model_config.hf_config)
        runner._vision_exp_placeholders = {} if vision else None
    return runner._vision_exp_placeholders


def _wrap_dispatcher_v1(module: Any) -> None:
    none = module.CUDAGraphMode.NONE

    def dispatch(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        if current().has_image_rows:
            kwargs["valid_modes"] = {none}
            # Only FULL is ever excluded, which NONE already leaves out.
            kwargs["invalid_modes"] = None
        return original(self, *args, **kwargs)

    patching.wrap(module.CudagraphDispatcher, "dispatch", dispatch)


def _wrap_dispatcher_v2(module: Any) -> None:
    none = module.CUDAGraphMode.NONE

    def dispatch(
        original: Callable[..., Any],
        self: Any,
        num_reqs: int,
        num_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        found = original(self, num_reqs, num_tokens, *args, **kwargs)
        if not current().has_image_rows or found.cg_mode == none:
            return found
        loras = getattr(found, "num_active_loras", None)  # from 0.24
        return module.BatchExecutionDescriptor(
            cg_mode=none,
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            **({} if loras is None else {"num_active_loras": loras}),
        )

    patching.wrap(module.CudaGraphManager, "dispatch", dispatch)
