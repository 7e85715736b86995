"""Two requests share an image's encoding: it is kept while one needs it, and reclaimable after.

A request refers to an encoding from the step that schedules its image to that step's end, for an
image is prefilled in one step. So both are scheduled in one step, and the first is aborted in it,
as a client that hangs up does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpu.lib.rig import SQUARE, Ask, Engine, random_image, replaced, with_images
from gpu.lib.steps import encoder_runs


@dataclass(frozen=True)
class Entry:
    """One encoding: requests that refer to it, whether it may be evicted, whether it is held."""

    users: int
    reclaimable: bool
    scheduler: bool
    worker: bool


@dataclass(frozen=True)
class Story:
    """The entry with two users, after one's abort, after the step, and under pressure."""

    shared: Entry
    aborted: Entry
    after: Entry
    pressed: Entry
    encoded: int
    #: Tokens of the second request's answer.
    tokens: int
    slots_back: bool


def entry(engine: Engine, key: str) -> Entry:
    manager = engine.scheduler.encoder_cache_manager
    users = manager.cached.get(key)
    held = engine.runner.encoder_cache
    return Entry(
        users=len(users or ()),
        reclaimable=key in manager.freeable,
        scheduler=users is not None,
        worker=key in getattr(held, "encoder_outputs", held),  # a class of its own in V2
    )


def story(engine: Engine) -> Story:
    """Runs it. The encoder must be counted (see steps.count_encoder)."""
    from vllm.v1.request import RequestStatus

    inner, scheduler = engine.llm.llm_engine, engine.scheduler
    shared = random_image(*SQUARE, seed=3000)
    engine.forget()
    before = encoder_runs(engine)
    names = [
        inner.add_request(name, ask.prompt(), engine.params(3))
        for name, ask in (
            ("first", with_images(60, [shared], 40, 96)),
            ("second", with_images(61, [shared], 39, 97)),
        )
    ]
    key = scheduler.requests[names[0]].mm_features[0].identifier
    schedule = scheduler.schedule
    seen: list[Entry] = []

    def aborting(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        seen.append(entry(engine, key))
        scheduler.finish_requests(names[0], RequestStatus.FINISHED_ABORTED)
        seen.append(entry(engine, key))
        return output

    with replaced(scheduler, "schedule", aborting):
        done = list(inner.step())
    after = entry(engine, key)
    inner.abort_request([names[0]], internal=True)
    while inner.has_unfinished_requests():
        done += inner.step()
    (answer,) = [output for output in done if output.finished]
    encoded = encoder_runs(engine) - before
    manager = scheduler.encoder_cache_manager
    back = manager.num_freeable_slots == manager.cache_size
    engine.ask(*press(manager.cache_size), max_tokens=1)
    engine.ask(Ask([5] * 20), max_tokens=1)  # the worker hears of evictions with the next step
    tokens = len(answer.outputs[0].token_ids)
    both, one = seen
    return Story(both, one, after, entry(engine, key), encoded, tokens, back)


def press(slots: int) -> list[Ask]:
    """Requests with as many distinct images as fill a cache of ``slots`` rows, and more."""
    rows = 100  # of a square image
    return [
        with_images(60, [random_image(*SQUARE, seed=3100 + i)], 40, 98)
        for i in range(slots // rows + 2)
    ]


def assess_story(story: Story) -> tuple[bool, str]:
    """Held for the second consumer after the first is gone; reclaimable and reclaimed after it."""
    wanted = {
        "with both": story.shared.users == 2 and not story.shared.reclaimable,
        "one aborted": story.aborted.users == 1 and not story.aborted.reclaimable,
        "held by the scheduler": story.aborted.scheduler,
        "after the step": story.after.users == 0 and story.after.reclaimable,
        "kept by the worker till it is needed": story.after.worker and story.after.scheduler,
        "encoded once": story.encoded == 1,
        "answered": story.tokens == 3,
        "all slots reclaimable": story.slots_back,
        "evicted": not story.pressed.scheduler and not story.pressed.worker,
    }
    failed = [name for name, good in wanted.items() if not good]
    detail = (
        f"users {story.shared.users}, {story.aborted.users} after an abort in the same step, "
        f"{story.after.users} after it, then reclaimable: {story.after.reclaimable}; encoded "
        f"{story.encoded} times; other images evict it: {not story.pressed.worker}"
    )
    return not failed, detail + "".join(f"; not as it should be: {name}" for name in failed)
