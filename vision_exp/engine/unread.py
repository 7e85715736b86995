"""Images in shared memory that no worker reads, because their request ended while it waited.

With `--mm-processor-cache-type shm` vLLM counts for each image how often the workers will read it,
and frees images in the order of arrival up to the first that is not read as often. A request that
ends before its first step would hold up everything behind its images for good. So the scheduler
names such requests with its next step, and the workers read their images then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Of a scheduler: request id -> features that no step has had. Of its output: lists of features.
FIELD = "vision_exp_unread"


def watch(scheduler: Any) -> None:
    """Note from now on which requests a scheduler has not scheduled yet."""
    multimodal = scheduler.vllm_config.model_config.multimodal_config
    if multimodal is not None and multimodal.mm_processor_cache_type == "shm":
        setattr(scheduler, FIELD, {})


def arrived(scheduler: Any, request: Any) -> None:
    """Note a request that the scheduler gets, or that was refused before."""
    unread = getattr(scheduler, FIELD, None)
    if unread is not None and request.mm_features:
        unread[request.request_id] = request.mm_features


def add_ended(scheduler: Any, output: Any) -> Any:
    """The scheduler's `output`, with what ended without having been in one."""
    unread: dict[str, Sequence[Any]] = getattr(scheduler, FIELD, None) or {}
    for new in output.scheduled_new_reqs:
        unread.pop(new.req_id, None)
    ended = [unread.pop(name) for name in list(unread) if name not in scheduler.requests]
    if ended:
        setattr(output, FIELD, ended)
    return output


def read(cache: Any, output: Any) -> None:
    """Read, in a worker, what a scheduler's output names; `cache`: the worker's receiver cache."""
    for features in getattr(output, FIELD, ()):
        cache.get_and_update_features(features)
