"""Which rows of a step are image rows, known on the host without a synchronisation.

Image blocks come from the placeholders that the scheduler sends with each request, and the rows
that run from the token ranges it schedules. So every rank of one scheduler computes the same
answer, and an image whose encoder output is cached counts like any other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vision_exp.config import is_vision_exp
from vision_exp.engine.context import NO_IMAGES, StepContext, set_current
from vision_exp.engine.failures.ranks import isolated
from vision_exp.engine.failures.worker import Failures
from vision_exp.engine.sightings import Sightings
from vision_exp.engine.spans import ImageSpan, scheduled_ranges, spans_of

Blocks = dict[str, tuple[ImageSpan, ...]]  # request id -> its images


def observe(blocks: Blocks, scheduler_output: Any) -> tuple[StepContext, bool]:
    """A step's images, and whether a draft that runs after it has image rows.

    blocks: images by request id, of every request seen so far; updated in place.
    An MTP draft reads each row's successor, so its rows reach one position further.
    """
    for request_id in scheduler_output.finished_req_ids:
        blocks.pop(request_id, None)
    for request in scheduler_output.scheduled_new_reqs:
        blocks.pop(request.req_id, None)
        if request.mm_features:
            blocks[request.req_id] = spans_of(request.mm_features)
    if not blocks:
        return StepContext(), False

    spans: dict[str, tuple[ImageSpan, ...]] = {}
    target = draft = False
    for request_id, start, stop in scheduled_ranges(scheduler_output):
        own = blocks.get(request_id)
        if own is None:
            continue
        spans[request_id] = own
        target = target or any(block.overlaps(start, stop) for block in own)
        draft = draft or any(block.overlaps(start, stop + 1) for block in own)
    return StepContext(target, spans), draft


def begin(runner: Any, scheduler_output: Any) -> bool:
    """Make the step that starts current; True if a draft that runs after it has image rows.

    Steps of other checkpoints know of no images.
    """
    if not hasattr(runner, "_vision_exp_blocks"):
        vision = is_vision_exp(runner.vllm_config.model_config.hf_config)
        runner._vision_exp_blocks = {} if vision else None
        runner._vision_exp_failures = Failures() if isolated(runner.vllm_config) else None
    if runner._vision_exp_blocks is None:
        set_current(NO_IMAGES)
        return False
    now, draft = observe(runner._vision_exp_blocks, scheduler_output)
    failures = runner._vision_exp_failures
    if failures is not None:
        cache = runner.encoder_cache
        failures.begin(scheduler_output, getattr(cache, "encoder_outputs", cache) or {})
    seen = Sightings() if now.has_image_rows or draft else None
    set_current(replace(now, failures=failures, seen=seen))
    return draft
