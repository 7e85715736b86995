"""When the tower fails on an image, that image's requests fail and the engine goes on.

vLLM takes any exception in a step for the end of the engine. Here a failed batch is encoded again
image by image; an image that fails alone gets zero rows, so that the step can finish, and every
request that reads those rows ends with an error instead of an answer.

Works where one process holds the scheduler and the only worker (no tensor or pipeline
parallelism). With several ranks an exception on one of them leaves the others waiting in a
collective, so there it stays fatal; so does a CUDA error that the device does not recover from.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from vision_exp import lazy
from vision_exp.config import is_vision_exp

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.v1.core.sched.scheduler:Scheduler.__init__",
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output(scheduler_output)",
    "vllm.v1.core.sched.scheduler:Scheduler.finish_requests(request_ids, finished_status)",
    "vllm.v1.core.sched.scheduler:Scheduler.vllm_config",
    "vllm.v1.core.sched.scheduler:Scheduler.requests",
    "vllm.v1.core.sched.scheduler:Scheduler.kv_cache_manager",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids(request_id)",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.evict_blocks(block_ids)",
    "vllm.v1.core.sched.output:SchedulerOutput.scheduled_new_reqs",
    "vllm.v1.core.sched.output:SchedulerOutput.scheduled_cached_reqs",
    "vllm.v1.core.sched.output:SchedulerOutput.num_scheduled_tokens",
    "vllm.v1.core.sched.output:NewRequestData.req_id",
    "vllm.v1.core.sched.output:NewRequestData.num_computed_tokens",
    "vllm.v1.core.sched.output:CachedRequestData.req_ids",
    "vllm.v1.core.sched.output:CachedRequestData.num_computed_tokens",
    "vllm.v1.request:Request.client_index",
    "vllm.v1.request:Request.is_finished",
    "vllm.v1.request:Request.mm_features",
    "vllm.v1.request:Request.num_computed_tokens",
    "vllm.v1.request:RequestStatus.FINISHED_ERROR",
    "vllm.v1.engine:EngineCoreOutput.request_id",
    "vllm.v1.engine:EngineCoreOutput.new_token_ids",
    "vllm.v1.engine:EngineCoreOutput.finish_reason",
    "vllm.v1.engine:EngineCoreOutputs.outputs",
    "vllm.v1.engine:FinishReason.ERROR",
    "vllm.v1.worker.gpu_model_runner:"
    "GPUModelRunner._batch_mm_inputs_from_scheduler(scheduler_output)",
    "vllm.v1.worker.gpu.mm.encoder_runner:EncoderRunner.prepare_mm_inputs",
    "vllm.config.parallel:ParallelConfig.world_size",
    "vllm.multimodal.inputs:MultiModalFeatureSpec.identifier",
    "vllm.multimodal.inputs:MultiModalFeatureSpec.mm_position",
    "vllm.multimodal.inputs:PlaceholderRange.offset",
    "vllm.multimodal.inputs:PlaceholderRange.length",
)

logger = logging.getLogger("vllm.vision_exp")

_scheduler_pid: int | None = None  # process that schedules a vision checkpoint; forks are others
_encoding: list[str] = []  # identifiers of the images that the current step encodes, in order
_failed: set[str] = set()  # identifiers whose cached rows are zeros


def install() -> None:
    """Wrap the scheduler, both model runners' input batching and the model's encoder."""
    lazy.when_imported("vllm.v1.core.sched.scheduler", _wrap_scheduler)
    lazy.when_imported("vllm.v1.worker.gpu_model_runner", _wrap_runner)
    lazy.when_imported("vllm.v1.worker.gpu.mm.encoder_runner", _wrap_encoder_runner)
    lazy.when_imported("vision_exp.model", _wrap_model)


def _wrap_scheduler(module: ModuleType) -> None:
    lazy.wrap(module.Scheduler, "__init__", _scheduler_init)
    lazy.wrap(module.Scheduler, "update_from_output", _update_from_output)


def _wrap_runner(module: ModuleType) -> None:
    lazy.wrap(module.GPUModelRunner, "_batch_mm_inputs_from_scheduler", _remember_images)


def _wrap_encoder_runner(module: ModuleType) -> None:
    lazy.wrap(module.EncoderRunner, "prepare_mm_inputs", _remember_images)


def _wrap_model(module: ModuleType) -> None:
    lazy.wrap(module.VisionExpMixin, "embed_multimodal", _embed_multimodal)


def _scheduler_init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    global _scheduler_pid
    original(self, *args, **kwargs)
    config = self.vllm_config
    if config.parallel_config.world_size == 1 and is_vision_exp(config.model_config.hf_config):
        _scheduler_pid = os.getpid()


def _remember_images(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    found = original(self, *args, **kwargs)
    identifiers, inputs = found[:2]
    _encoding[:] = [
        identifier
        for identifier, (modality, _) in zip(identifiers, inputs, strict=True)
        if modality == "image"
    ]
    return found


def _embed_multimodal(original: Any, self: Any, **kwargs: Any) -> Sequence[torch.Tensor]:
    count = len(kwargs["llm_grid"])
    identifiers, _encoding[:] = _encoding[:count], _encoding[count:]
    if _scheduler_pid != os.getpid() or len(identifiers) < count:
        return original(self, **kwargs)  # several processes, or a profiling run
    try:
        rows = _checked(original(self, **kwargs), kwargs["llm_grid"])
    except Exception as error:  # noqa: BLE001 - whatever it is, it concerns these images alone
        _recover(error)
        rows = [
            _encode_alone(original, self, identifier, one)
            for identifier, one in zip(identifiers, split(kwargs), strict=True)
        ]
    else:
        _failed.difference_update(identifiers)
    return rows


def _encode_alone(original: Any, model: Any, identifier: str, kwargs: Any) -> torch.Tensor:
    try:
        (rows,) = _checked(original(model, **kwargs), kwargs["llm_grid"])
    except Exception as error:
        _recover(error)
        _failed.add(identifier)
        logger.exception("[vision-exp] an image cannot be encoded; its requests fail")
        height, width = kwargs["llm_grid"][0].tolist()
        return model.image_start.new_zeros((height * width, model.image_start.shape[-1]))
    _failed.discard(identifier)
    return rows


def _checked(rows: Sequence[torch.Tensor], llm_grid: torch.Tensor) -> Sequence[torch.Tensor]:
    counts = [height * width for height, width in llm_grid.tolist()]
    found = [len(one) for one in rows]
    if found != counts:
        raise ValueError(f"the tower gave {found} rows for images of {counts}")
    return rows


def _recover(error: Exception) -> None:
    """Raise `error` again if the device is lost with it; else make room for another attempt."""
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as lost:
        raise error from lost


def split(kwargs: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The encoder's inputs for several images (see processor.py) as inputs for one each."""
    vit, llm = kwargs["vit_grid"], kwargs["llm_grid"]
    patches = kwargs["patches"].split(vit.prod(-1).tolist())
    perm = kwargs["perm"].split(llm.prod(-1).tolist())
    return [
        {**kwargs, "patches": p, "perm": o, "vit_grid": v, "llm_grid": g}
        for p, o, v, g in zip(patches, perm, vit.split(1), llm.split(1), strict=True)
    ]


def _update_from_output(original: Any, self: Any, scheduler_output: Any, *args: Any) -> Any:
    doomed = _readers(self, scheduler_output) if _failed else []
    if doomed:
        _finish(self, doomed)
    outputs = original(self, scheduler_output, *args)
    if doomed:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        for request in doomed:
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(
                EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR)
            )
    return outputs


def _readers(scheduler: Any, scheduler_output: Any) -> list[Any]:
    """Unfinished requests whose tokens of this step include rows of a failed image."""
    starts = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
    cached = scheduler_output.scheduled_cached_reqs
    starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    readers = []
    for name, count in scheduler_output.num_scheduled_tokens.items():
        request = scheduler.requests.get(name)
        if request is None or request.is_finished():
            continue
        start = starts.get(name, request.num_computed_tokens - count)
        for feature in request.mm_features or ():
            place = feature.mm_position
            reached = place.offset < start + count and start < place.offset + place.length
            if reached and feature.identifier in _failed:
                readers.append(request)
                break
    return readers


def _finish(scheduler: Any, requests: Sequence[Any]) -> None:
    from vllm.v1.request import RequestStatus

    manager = scheduler.kv_cache_manager
    for request in requests:
        # What was computed from zero rows may not serve a later request with the same picture.
        blocks = {block for group in manager.get_block_ids(request.request_id) for block in group}
        manager.evict_blocks(blocks)
    scheduler.finish_requests({r.request_id for r in requests}, RequestStatus.FINISHED_ERROR)
