"""Requests that read an image which could not be encoded end with an error: the scheduler's side.

The worker names them with the output of the step (see encoder_failures.py), in an attribute that
only such outputs have. It is pickled with the output, so it comes from a worker process too.

Tokens sampled for these requests are dropped. Blocks of the prefix cache that hold rows from the
image on are forgotten, and requests that share such a block already end too. The image loses its
place in the encoder cache, so the next request that brings it has it encoded again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from types import ModuleType
from typing import Any

from vision_exp import patching

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output("
    "scheduler_output, model_runner_output)",
    "vllm.v1.core.sched.scheduler:Scheduler.finish_requests(request_ids, finished_status)",
    "vllm.v1.core.sched.scheduler:Scheduler.requests",
    "vllm.v1.core.sched.scheduler:Scheduler.kv_cache_manager",
    "vllm.v1.core.sched.scheduler:Scheduler.encoder_cache_manager",
    "vllm.v1.core.encoder_cache_manager:EncoderCacheManager.cached",
    "vllm.v1.core.encoder_cache_manager:EncoderCacheManager.freeable",
    "vllm.v1.core.encoder_cache_manager:EncoderCacheManager.freed",
    "vllm.v1.core.encoder_cache_manager:EncoderCacheManager.num_free_slots",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids(request_id)",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.evict_blocks(block_ids)",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.block_pool",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.coordinator",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.single_type_managers",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.block_size",
    "vllm.v1.core.block_pool:BlockPool.null_block",
    "vllm.v1.core.block_pool:BlockPool.num_gpu_blocks",
    "vllm.v1.request:Request.client_index",
    "vllm.v1.request:Request.is_finished",
    "vllm.v1.request:Request.mm_features",
    "vllm.v1.request:RequestStatus.FINISHED_ERROR",
    "vllm.v1.engine:EngineCoreOutput.request_id",
    "vllm.v1.engine:EngineCoreOutput.new_token_ids",
    "vllm.v1.engine:EngineCoreOutput.finish_reason",
    "vllm.v1.engine:EngineCoreOutput.stop_reason",
    "vllm.v1.engine:EngineCoreOutputs.outputs",
    "vllm.v1.engine:FinishReason.ERROR",
    "vllm.v1.outputs:AsyncModelRunnerOutput.get_output",
    "vllm.multimodal.inputs:MultiModalFeatureSpec.identifier",
)

FIELD = "vision_exp_failed"


@dataclass(frozen=True)
class Reader:
    """A request that read rows of a failed image."""

    image: str  # identifier of its first such image
    position: int  # where that image starts in the prompt
    reason: str


@dataclass(frozen=True)
class Failed:
    """What one step of the worker has to report."""

    readers: dict[str, Reader]  # by request id
    images: frozenset[str]  # identifiers of images that have no rows in the worker's cache


def attach(output: Any, failed: Failed) -> Any:
    """The output of a step with `failed` on it, also if it is fetched from the device later."""
    from vllm.v1.outputs import AsyncModelRunnerOutput

    if isinstance(output, AsyncModelRunnerOutput):
        fetch: Any = output.get_output
        output.get_output = lambda: attach(fetch(), failed)  # type: ignore[method-assign]
        return output
    marked = copy.copy(output)  # vLLM shares one empty output
    setattr(marked, FIELD, failed)
    return marked


def install() -> None:
    """Wrap the scheduler, now or when vLLM imports it."""
    patching.when_imported("vllm.v1.core.sched.scheduler", _wrap_scheduler)


def _wrap_scheduler(module: ModuleType) -> None:
    patching.wrap(module.Scheduler, "update_from_output", _update_from_output)


def _update_from_output(
    original: Any, scheduler: Any, scheduler_output: Any, model_runner_output: Any
) -> Any:
    failed: Failed | None = getattr(model_runner_output, FIELD, None)
    if failed is None:
        return original(scheduler, scheduler_output, model_runner_output)
    ended = fail(scheduler, failed)
    outputs = original(scheduler, scheduler_output, model_runner_output)
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    for request, reason in ended:
        one = EngineCoreOutput(
            request.request_id, [], finish_reason=FinishReason.ERROR, stop_reason=reason
        )
        outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(one)
    return outputs


def fail(scheduler: Any, failed: Failed) -> list[tuple[Any, str]]:
    """End the readers and whoever shares their blocks; (request, reason) of each."""
    from vllm.v1.request import RequestStatus

    manager = scheduler.kv_cache_manager
    running = {n: request for n, request in scheduler.requests.items() if not request.is_finished()}
    blocks = {name: manager.get_block_ids(name) for name in running}
    ended = {name: reader.reason for name, reader in failed.readers.items() if name in running}
    spoilt: set[int] = set()
    for name in ended:
        spoilt |= _from(manager, blocks[name], failed.readers[name].position)
    spoilt.discard(manager.block_pool.null_block.block_id)
    for name in running.keys() - failed.readers.keys():
        # A block can be found from the moment it is scheduled, also by a request whose own tokens
        # all come after the image.
        if spoilt.intersection(chain.from_iterable(blocks[name])):
            ended[name] = "it shares blocks of the KV cache with a request whose image failed"
    for name, reader in failed.readers.items():
        if not any(blocks.get(name, ())):
            # Preempted or cancelled while its step ran. Which blocks it had is not known any more,
            # and they can still be found.
            spoilt.update(range(manager.block_pool.num_gpu_blocks))
            alike = (n for n, request in running.items() if _has(request, reader.image))
            ended.update((n, reader.reason) for n in alike if n not in ended)
    manager.evict_blocks(spoilt)
    scheduler.finish_requests(set(ended), RequestStatus.FINISHED_ERROR)
    _forget(scheduler.encoder_cache_manager, failed.images)
    return [(running[name], reason) for name, reason in ended.items()]


def _from(manager: Any, blocks: Iterable[list[int]], position: int) -> set[int]:
    """Ids of a request's blocks, of every group, that reach `position` or lie behind it."""
    found: set[int] = set()
    for group, one in zip(blocks, manager.coordinator.single_type_managers, strict=True):
        found.update(group[position // one.block_size :])
    return found


def _has(request: Any, image: str) -> bool:
    return any(feature.identifier == image for feature in request.mm_features or ())


def _forget(manager: Any, images: Iterable[str]) -> None:
    """Take images that no request refers to out of the encoder cache, as if for lack of room."""
    for image in images:
        if image in manager.freeable:
            manager.num_free_slots += manager.freeable.pop(image)
            del manager.cached[image]
            manager.freed.append(image)
