"""Runs of a prompt with what the engine did in them: steps, encoded images, preemption."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpu.lib.answers import Answer, answer_of
from gpu.lib.equivalence import Run
from gpu.lib.rig import Ask, Engine, replaced


class Steps:
    """What the scheduler gave to each request's prefill, in order of the steps."""

    def __init__(self) -> None:
        self.ranges: dict[str, list[tuple[int, int]]] = {}
        self.blocks: dict[str, list[tuple[int, int]]] = {}
        #: Most prompts with images of which one step computed something.
        self.together = 0


@contextmanager
def recorded_steps(scheduler: Any) -> Iterator[Steps]:
    """Records the positions that every step computes of prompts, and where their images lie."""
    found = Steps()
    schedule = scheduler.schedule

    def recorded(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        images = 0
        for name, count in output.num_scheduled_tokens.items():
            request = scheduler.requests[name]
            # The scheduler has counted the step's tokens as computed already.
            start = request.num_computed_tokens - count
            if start < request.num_prompt_tokens:
                found.ranges.setdefault(name, []).append((start, start + count))
                images += bool(request.mm_features)
            places = [feature.mm_position for feature in request.mm_features or ()]
            found.blocks[name] = [(p.offset, p.offset + p.length) for p in places]
        found.together = max(found.together, images)
        return output

    with replaced(scheduler, "schedule", recorded):
        yield found


def watched(engine: Engine, action: Callable[[], Answer]) -> Run:
    """Runs ``action``, which has one request, and tells what the engine did."""
    before = encoder_runs(engine)
    with recorded_steps(engine.scheduler) as steps:
        answer = action()
    (name,) = steps.ranges
    encoded = encoder_runs(engine) - before
    return Run(answer, encoded, tuple(steps.ranges[name]), tuple(steps.blocks[name]))


def preempted(
    engine: Engine, ask: Ask, *, steps: int, forgetful: bool = False, max_tokens: int = 8
) -> Answer:
    """Runs ``steps`` steps, throws the running request out of the KV cache, and lets it finish.

    ``forgetful``: encoded and processed images are forgotten as well.
    """
    inner = engine.llm.llm_engine
    inner.add_request("preempted", ask.prompt(), engine.params(max_tokens))
    done: list[Any] = []
    for _ in range(steps):
        done += inner.step()
    if not engine.llm.reset_prefix_cache(reset_running_requests=True):
        raise RuntimeError("the request was not preempted")
    if forgetful:
        engine.forget_images()
    while inner.has_unfinished_requests():
        done += inner.step()
    return answer_of([output for output in done if output.finished][-1])


def count_encoder(engine: Engine) -> None:
    """Counts the images that go through the tower from now on."""
    model = engine.model
    if hasattr(model, "_encoder_runs"):
        return
    plain = model.embed_multimodal
    model._encoder_runs = 0

    def counted(**kwargs: object) -> object:
        rows = plain(**kwargs)
        model._encoder_runs += len(rows)
        return rows

    model.embed_multimodal = counted


def encoder_runs(engine: Engine) -> int:
    """Images that went through the tower since `count_encoder`."""
    count: int = engine.model._encoder_runs
    return count
