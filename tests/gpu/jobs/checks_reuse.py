"""Warm equals cold: caches, chunks, co-batching and preemption leave answers to images alone.

    checks_reuse.py MODEL REPORT.json GRAPHS.json

With CUDA graphs on. Every image prompt has a text twin of the same length, whose repeats and
treated runs tell what the model itself moves by; the criterion is in equivalence.py. Each row also
assesses that what it names took place: the encoder's runs, the cached tokens, the steps. GRAPHS
gets the answers that checks_graphs.py holds against an eager engine's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu.jobs import checks_graphs
from gpu.jobs.checks_visibility import causal
from gpu.lib.answers import Answer, noise_of
from gpu.lib.controls import FEATURE_OFF, OTHER_IMAGE, OTHERS
from gpu.lib.equivalence import (
    Needs,
    Run,
    Runs,
    both,
    encodes,
    hits,
    nearness,
    restarted,
    same_answers,
    unsplit,
)
from gpu.lib.rig import SQUARE, WIDE, Ask, Engine, Report, random_image, text_ids, with_images
from gpu.lib.steps import count_encoder, preempted, recorded_steps, watched

#: Text before the image of the long prompts; WIDE then takes positions 600 to 968.
BEFORE = 600
BLOCK = 369
#: Text after it, and what comes of it all.
AFTER, TOTAL = 40, 1009
#: Chunk ends: in the leading pads, after START, amid the image, before END.
CHUNKS = {"start - 1": 602, "start + 1": 604, "middle": 785, "end - 1": 967}
#: A chunk that ends after the image and before the prompt's end.
PAST = 985
#: Cold runs of a prompt, and runs of each treatment.
COLD, TREATED = 6, 2
#: Times that a treated run is asked for until it begins like a cold one.
TRIES = 5


@dataclass(frozen=True)
class Pair:
    """An image prompt and its text twin, with their cold repeats and the image's controls."""

    image: Ask
    text: Ask
    cold: list[Answer]
    cold_text: list[Answer]
    controls: dict[str, float]


class Equivalence:
    """Holds the cold repeats of the long prompts, and adds one row per treatment of a prompt."""

    def __init__(self, engine: Engine, report: Report) -> None:
        self.engine, self.report = engine, report
        self.pairs: dict[str, Pair] = {}

    def take(self, name: str, seed: int, after: int) -> tuple[bool, str]:
        """Takes the repeats of a prompt. The criterion can fail: the controls are beyond it."""
        image = with_images(BEFORE, [random_image(*WIDE, seed=20 + seed)], after, 30 + seed)
        text = Ask(text_ids(BEFORE + BLOCK + after, 40 + seed))
        cold, cold_text = self._cold(image, COLD), self._cold(text, COLD)
        other = self._cold(Ask(image.ids, (random_image(*WIDE, seed=77),)), OTHERS)
        with causal(self.engine):
            off = self._cold(image, OTHERS)
        distances = {OTHER_IMAGE: nearness(cold, other), FEATURE_OFF: nearness(cold, off)}
        self.pairs[name] = Pair(image, text, cold, cold_text, distances)
        limit, own = Runs(cold_text, []).spread(), Runs(cold, []).spread()
        words = ", ".join(f"{name} {value:.3f}" for name, value in distances.items())
        detail = f"to the nearest of {COLD} cold runs: {words}; repeats of the text {limit:.3f}, "
        return min(distances.values()) > limit, detail + f"of the image {own:.3f}"

    def _cold(self, ask: Ask, times: int) -> list[Answer]:
        return [self.engine.cold(ask) for _ in range(times)]

    def row(
        self,
        name: str,
        treat: Callable[[Ask], Run],
        needs: Needs,
        *,
        prompt: str = "long",
        at: int = 0,
    ) -> None:
        def check() -> tuple[bool, str]:
            pair = self.pairs[prompt]
            noise = noise_of(each.cold_text for each in self.pairs.values())
            images = [begun(treat, pair.image, pair.cold, at) for _ in range(TREATED)]
            texts = [begun(treat, pair.text, pair.cold_text, at) for _ in range(TREATED)]
            there, what = needs(images, texts)
            image = Runs(pair.cold, [run.answer for run in images], at)
            text = Runs(pair.cold_text, [run.answer for run in texts], at)
            same, words = same_answers([image], [text], pair.controls, noise)
            return there and same, f"{what}; {words}"

        self.report.run(name, check)


def begun(treat: Callable[[Ask], Run], ask: Ask, cold: Sequence[Answer], at: int) -> Run:
    """A treated run whose first ``at`` tokens, from before the treatment, are those of a cold run.

    Near ties make some runs begin otherwise, and what follows other tokens has no distance.
    """
    known = {tuple(each.tokens[:at]) for each in cold}
    for _ in range(TRIES):
        run = treat(ask)
        if tuple(run.answer.tokens[:at]) in known:
            return run
    raise RuntimeError(f"none of {TRIES} runs began like one of {len(cold)} cold runs")


def main(folder: str, report_path: str, graphs_path: str) -> int:
    report = Report(Path(report_path))
    engine = Engine(
        folder,
        probed=True,
        enforce_eager=False,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8]},
    )
    count_encoder(engine)
    equivalence = Equivalence(engine, report)
    report.run("control, long prompt", lambda: equivalence.take("long", 0, AFTER))
    report.run("control, longer prompt", lambda: equivalence.take("longer", 1, 300))
    caches(engine, equivalence)
    chunks(engine, equivalence)
    report.run("8 concurrent requests equal alone", lambda: cobatched(engine))
    preemption(engine, equivalence)
    refusals(engine, report)
    report.run("CUDA graphs: which steps replay them", lambda: checks_graphs.replays(engine))
    checks_graphs.take(engine, Path(graphs_path))
    return 0


def caches(engine: Engine, equivalence: Equivalence) -> None:
    def encoder_hit(ask: Ask) -> Run:
        engine.forget()
        engine.ask(Ask(text_ids(61, 50) + ask.ids[BEFORE:], ask.images), max_tokens=1)
        engine.llm.reset_prefix_cache()
        return watched(engine, lambda: engine.ask(ask)[0])

    equivalence.row("encoder-cache hit", encoder_hit, encodes(0))

    def prefix(first: Callable[[Ask], Ask]) -> Callable[[Ask], Run]:
        def treat(ask: Ask) -> Run:
            engine.forget()
            engine.ask(first(ask), max_tokens=1)
            return watched(engine, lambda: engine.ask(ask)[0])

        return treat

    def another_middle(ask: Ask) -> Ask:
        if ask.images:
            return Ask(ask.ids, (random_image(*WIDE, seed=77),))
        return Ask(ask.ids[:BEFORE] + text_ids(len(ask.ids) - BEFORE, 52))

    another_tail = prefix(lambda ask: Ask(ask.ids[:-20] + text_ids(20, 51), ask.images))
    row = equivalence.row
    # An image other than the first request's is encoded; the same one is cached or not needed.
    before = both(hits(512, 512, "before"), encodes(1))
    row("prefix hit ending before an image", prefix(another_middle), before)
    inside = both(hits(512, 768, "inside"), encodes(0))
    row("prefix hit that would end inside an image", another_tail, inside)
    after = both(hits(1024, 1024, "after"), encodes(0))
    row("prefix hit ending after an image", another_tail, after, prompt="longer")
    row("whole prompt again", prefix(lambda ask: ask), inside)


def chunks(engine: Engine, equivalence: Equivalence) -> None:
    for name, size in CHUNKS.items():

        def treat(ask: Ask, size: int = size) -> Run:
            engine.forget()
            with engine.chunks_of(size):
                return watched(engine, lambda: engine.ask(ask)[0])

        needs = both(unsplit(size), encodes(1))
        equivalence.row(f"chunk that would end at the image's {name}", treat, needs)


def cobatched(engine: Engine) -> tuple[bool, str]:
    """Eight requests at once, text and images mixed, two of them the same image."""
    square, wide, other = (
        random_image(*SQUARE, seed=60),
        random_image(*WIDE, seed=61),
        random_image(*SQUARE, seed=62),
    )
    # Texts as long as the images: short ones repeat themselves bit for bit.
    texts = [Ask(text_ids(605, 70)), Ask(text_ids(300, 73)), Ask(text_ids(471, 77))]
    images = [
        with_images(60, [square], 40, 71),
        with_images(62, [wide], 40, 72),
        with_images(63, [square], 41, 74),
        with_images(61, [square, wide], 40, 75),
        with_images(60, [other], 40, 76),
    ]
    asks = [texts[0], *images[:2], texts[1], *images[2:], texts[2]]
    cold = [[engine.cold(ask) for _ in range(COLD)] for ask in asks]
    rounds, together = [], []
    for _ in range(TREATED):
        engine.forget()
        with recorded_steps(engine.scheduler) as steps:
            rounds.append(engine.ask(*asks))
        together.append(steps.together)
    answers = zip(*rounds, strict=True)
    runs = [Runs(mine, found) for mine, found in zip(cold, answers, strict=True)]
    alone = [found for found, ask in zip(runs, asks, strict=True) if ask.images]
    text_runs = [found for found, ask in zip(runs, asks, strict=True) if not ask.images]
    swapped = Ask(images[0].ids, (other,))
    others = [engine.cold(swapped) for _ in range(OTHERS)]
    with causal(engine):
        off = [[engine.cold(ask) for _ in range(OTHERS)] for ask in images]
    controls = {
        OTHER_IMAGE: nearness(alone[0].cold, others),
        f"{FEATURE_OFF} in the nearest of five prompts": min(
            nearness(mine.cold, found) for mine, found in zip(alone, off, strict=True)
        ),
    }
    same, words = same_answers(
        alone, text_runs, controls, noise_of(list(r.cold) for r in text_runs)
    )
    least = min(together)
    return same and least > 1, f"{least} of {len(images)} image prompts in one step; {words}"


def preemption(engine: Engine, equivalence: Equivalence) -> None:
    def interrupted(chunk: int, *, forgetful: bool = False) -> Callable[[Ask], Run]:
        def treat(ask: Ask) -> Run:
            engine.forget()
            with engine.chunks_of(chunk):
                return watched(engine, lambda: preempted(engine, ask, steps=1, forgetful=forgetful))

        return treat

    whole, past, short = interrupted(2048), interrupted(PAST), interrupted(CHUNKS["middle"])
    # The first token is from before, the second from after the preemption.
    needs = both(restarted(TOTAL, TOTAL + 1), encodes(1))
    equivalence.row("preempted while generating", whole, needs, at=1)
    needs = both(restarted(PAST, TOTAL), encodes(1))
    equivalence.row("preempted between prefill chunks", past, needs)
    needs = both(restarted(BEFORE, TOTAL), encodes(1))
    equivalence.row("preempted before the image's prefill", short, needs)
    # The image is encoded a second time, from what the request itself still holds.
    needs = both(restarted(PAST, TOTAL), encodes(2))
    forgetful = interrupted(PAST, forgetful=True)
    equivalence.row("preempted between prefill chunks, encoder cache emptied", forgetful, needs)


def refusals(engine: Engine, report: Report) -> None:
    """Sentinel ids typed as token ids are refused, and the engine lives on."""

    def check() -> tuple[bool, str]:
        try:
            engine.ask(Ask([*text_ids(30, 80), 129259]), max_tokens=1)
        except Exception as error:  # noqa: BLE001 - any refusal counts, its words are shown
            after = engine.ask(Ask(text_ids(60, 77)), max_tokens=1)
            return bool(after[0].tokens), f"{type(error).__name__}: {str(error)[:120]}"
        return False, "an IMAGE id typed in a prompt was accepted"

    report.run("typed sentinel id is refused", check)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
