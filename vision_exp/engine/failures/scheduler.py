"""Requests that read an image which could not be encoded end with an error: the scheduler's side.

The worker names them with the output of the step (see worker.py), in an attribute that
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
from typing import Any

FIELD = "vision_exp_failed"


@dataclass(frozen=True)
class AffectedRequest:
    """A request that read rows of a failed image."""

    image: str  # identifier of its first such image
    position: int  # where that image starts in the prompt
    reason: str


@dataclass(frozen=True)
class FailedStep:
    """What one step of the worker has to report."""

    affected: dict[str, AffectedRequest]  # by request id
    images: frozenset[str]  # identifiers of images that have no rows in the worker's cache


def attach(output: Any, failed: FailedStep) -> Any:
    """The output of a step with `failed` on it, also if it is fetched from the device later."""
    from vllm.v1.outputs import AsyncModelRunnerOutput

    if isinstance(output, AsyncModelRunnerOutput):
        fetch: Any = output.get_output
        output.get_output = lambda: attach(fetch(), failed)  # type: ignore[method-assign]
        return output
    marked = copy.copy(output)  # vLLM shares one empty output
    setattr(marked, FIELD, failed)
    return marked


def failed_step(output: Any) -> FailedStep | None:
    """What `attach` put on a step's output, if anything."""
    return getattr(output, FIELD, None)


def add_errors(outputs: Any, ended: Iterable[tuple[Any, str]]) -> None:
    """Tell the clients of ended requests, (request, reason), in the scheduler's `outputs`."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    for request, reason in ended:
        one = EngineCoreOutput(
            request.request_id, [], finish_reason=FinishReason.ERROR, stop_reason=reason
        )
        outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(one)


def end_requests(scheduler: Any, failed: FailedStep) -> list[tuple[Any, str]]:
    """End the affected requests and whoever shares their blocks; (request, reason) of each."""
    from vllm.v1.request import RequestStatus

    manager = scheduler.kv_cache_manager
    running = {n: request for n, request in scheduler.requests.items() if not request.is_finished()}
    blocks = {name: manager.get_block_ids(name) for name in running}
    ended = {name: one.reason for name, one in failed.affected.items() if name in running}
    tainted_blocks: set[int] = set()
    for name in ended:
        tainted_blocks |= _from(manager, blocks[name], failed.affected[name].position)
    tainted_blocks.discard(manager.block_pool.null_block.block_id)
    for name in running.keys() - failed.affected.keys():
        # A block can be found from the moment it is scheduled, also by a request whose own tokens
        # all come after the image.
        if tainted_blocks.intersection(chain.from_iterable(blocks[name])):
            ended[name] = "it shares blocks of the KV cache with a request whose image failed"
    for name, one in failed.affected.items():
        if not any(blocks.get(name, ())):
            # Preempted or cancelled while its step ran. Which blocks it had is not known any more,
            # and they can still be found.
            tainted_blocks.update(range(manager.block_pool.num_gpu_blocks))
            same_image = (n for n, request in running.items() if _has(request, one.image))
            ended.update((n, one.reason) for n in same_image if n not in ended)
    manager.evict_blocks(tainted_blocks)
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
