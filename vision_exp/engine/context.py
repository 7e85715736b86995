"""What the step that now runs knows about images: one frozen value, made and asked for here.

The wrapper of `execute_model` makes it from the scheduler's message before anything of the step
runs. What becomes known later (the order of requests, the mask of image rows, the layer call that
runs) replaces the value by one with that fact added. It stays until the next step, dummy run or
capture: what runs in between, the draft and the sampling, belongs to the same step.

Threads: one value per process, for every thread. vLLM runs a worker's steps one after another, and
all of a step in the thread that calls `execute_model`, with one exception: micro-batches
(`gpu_ubatch_wrapper.py`) have threads of their own. Those start inside the model call and end
before it returns, and they take turns: one runs until it waits inside a kernel's dispatch or
combine. So they must see the value of the thread that started them, which thread-local or context
variables would hide, and no two of them publish at once. A mask that the other one replaced is made
again; what a layer call publishes is used before it hands over. Threads that only fetch outputs are
handed what they need and do not ask here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vision_exp.engine.spans import ImageSpan

if TYPE_CHECKING:
    import torch

    from vision_exp.engine.failures.worker import Failures
    from vision_exp.engine.sightings import Sightings


@dataclass(frozen=True)
class StepContext:
    """What one step knows about images.

    has_image_rows: a row that runs now lies in an image block, leading pads included.
    spans: request id -> every image of that request, for scheduled requests that have any.
    request_ids: requests in batch order, once attention is prepared in a step with `spans`.
    image_mask: (token ids, which of them are image rows), the latest that routing made.
    mega_moe: the MegaMoE layer whose forward runs. prefill: the images of the FlashMLA prefill
    call that runs, and how far it is (visibility/flashmla.py).
    failures: what the runner knows about images without rows; None where failures stay fatal.
    seen: what the layers note in this step; None in steps without image rows.
    """

    has_image_rows: bool = False
    spans: Mapping[str, tuple[ImageSpan, ...]] = field(default_factory=dict)
    request_ids: tuple[str, ...] = ()
    image_mask: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, compare=False)
    mega_moe: Any = field(default=None, compare=False)
    prefill: Any = field(default=None, compare=False)
    failures: Failures | None = field(default=None, compare=False)
    seen: Sightings | None = field(default=None, compare=False)


NO_IMAGES = StepContext()
_current = NO_IMAGES


def current() -> StepContext:
    """The step that runs; NO_IMAGES before the first one, in dummy runs and in captures."""
    return _current


def set_current(step: StepContext) -> StepContext:
    """Make `step` current and return what was current before."""
    global _current
    before, _current = _current, step
    return before


def publish(**facts: Any) -> None:
    """Add facts, fields of StepContext by name, to the current step."""
    set_current(replace(_current, **facts))


@contextmanager
def during(**facts: Any) -> Iterator[None]:
    """Publish facts for the time of one call, then what they were before."""
    before = {name: getattr(_current, name) for name in facts}
    publish(**facts)
    try:
        yield
    finally:
        publish(**before)
