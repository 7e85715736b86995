"""Warm equals cold: caches, chunks, company and preemption leave the answer to images unchanged.

    checks_reuse.py MODEL REPORT.json EAGER.json

With CUDA graphs on. Every image case has a text twin of the same length: what the twin's first
token moves by under the same treatment is the model's own noise, and an image answer may move by
little more even where its greedy tokens part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu import checks_reference
from gpu.rig import (
    SQUARE,
    WIDE,
    Answer,
    Ask,
    Engine,
    Report,
    as_repeated,
    load_answers,
    noise_of,
    picture,
    text_ids,
    with_images,
)

#: Text before the picture of the long prompt; WIDE then takes positions 600 to 968.
BEFORE = 600
BLOCK = 369
#: Chunk ends: in the leading pads, after START, amid the picture, before END.
CHUNKS = {"start - 1": 602, "start + 1": 604, "middle": 785, "end - 1": 967}
#: Cold runs of one request with CUDA graphs, to learn what it varies by itself.
REPEATS = 8
#: Allowed on top of the text twin's own movement of a log-probability.
SLACK = 0.1


class Judge:
    """Adds one row per comparison: tokens equal, or the movement within the text twin's."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def row(
        self, name: str, treat: Callable[[Ask], tuple[Answer, Answer, str]], image: Ask, text: Ask
    ) -> None:
        def check() -> tuple[bool, str]:
            cold, warm, note = treat(image)
            moved = cold.distance(warm)
            cold_text, warm_text, _ = treat(text)
            noise = cold_text.distance(warm_text)
            same = cold.tokens == warm.tokens
            text_same = cold_text.tokens == warm_text.tokens
            words = (
                f"tokens {_equal(same)}, first token moved {moved:.3g}, "
                f"text twin {noise:.3g} (tokens {_equal(text_same)})"
            )
            return moved <= 2 * noise + SLACK, f"{words}{note}"

        self.report.run(name, check)


def _equal(same: bool) -> str:
    return "equal" if same else "differ"


def main(folder: str, report_path: str, eager_path: str) -> int:
    report = Report(Path(report_path))
    engine = Engine(
        folder, enforce_eager=False, compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8]}
    )
    graphs_equal_eager(engine, report, Path(eager_path))
    judge = Judge(report)
    caches(engine, judge)
    chunks(engine, judge)
    company(engine, report)
    preemption(engine, judge)
    refusals(engine, report)
    return 0


def long_pair(seed: int = 0, after: int = 40) -> tuple[Ask, Ask]:
    """The long prompt with the wide picture, and its text twin of the same length."""
    image = with_images(BEFORE, [picture(*WIDE, seed=20 + seed)], after, 30 + seed)
    return image, Ask(text_ids(BEFORE + BLOCK + after, 40 + seed))


def graphs_equal_eager(engine: Engine, report: Report, path: Path) -> None:
    """The eager run's answers part from repeats with graphs by no more than those do themselves."""
    eager, asks = load_answers(path), checks_reference.asks()
    repeats = {name: [engine.cold(ask) for _ in range(REPEATS)] for name, ask in asks.items()}
    noise = noise_of(repeats.values())
    for name, group in repeats.items():
        report.run(
            f"CUDA graphs on, {name}: tokens as eager",
            lambda name=name, group=group: as_repeated(eager[name], group, noise),
        )


def caches(engine: Engine, judge: Judge) -> None:
    def encoder_hit(ask: Ask) -> tuple[Answer, Answer, str]:
        cold = engine.cold(ask)
        engine.forget()
        engine.ask(Ask(text_ids(61, 50) + ask.ids[BEFORE:], ask.pictures), max_tokens=1)
        engine.llm.reset_prefix_cache()
        before = encoder_runs(engine)
        warm = engine.ask(ask)[0]
        return cold, warm, f"; encoder ran {encoder_runs(engine) - before} times in the warm run"

    count_encoder(engine)
    image, text = long_pair()
    judge.row("encoder-cache hit", encoder_hit, image, text)

    def prefix(first: Callable[[Ask], Ask]) -> Callable[[Ask], tuple[Answer, Answer, str]]:
        def treat(ask: Ask) -> tuple[Answer, Answer, str]:
            cold = engine.cold(ask)
            engine.forget()
            engine.ask(first(ask), max_tokens=1)
            warm = engine.ask(ask)[0]
            return cold, warm, f"; {warm.cached} tokens from the prefix cache"

        return treat

    other = picture(*WIDE, seed=77)
    another_picture = prefix(lambda a: Ask(a.ids, (other,) if a.pictures else ()))
    another_tail = prefix(lambda a: Ask(a.ids[:-20] + text_ids(20, 51), a.pictures))
    judge.row("prefix hit ending before an image", another_picture, image, text)
    judge.row("prefix hit ending inside an image", another_tail, image, text)
    longer, longer_text = long_pair(seed=1, after=300)
    judge.row("prefix hit ending after an image", another_tail, longer, longer_text)
    judge.row("whole prompt again", prefix(lambda a: a), image, text)


def chunks(engine: Engine, judge: Judge) -> None:
    image, text = long_pair()
    for name, size in CHUNKS.items():

        def treat(ask: Ask, size: int = size) -> tuple[Answer, Answer, str]:
            cold = engine.cold(ask)
            engine.forget()
            with engine.chunks_of(size):
                return cold, engine.ask(ask)[0], f"; steps of at most {size} tokens"

        judge.row(f"chunk ending at the image's {name}", treat, image, text)


def company(engine: Engine, report: Report) -> None:
    """Eight requests at once, text and images mixed, two of them the same picture."""
    square, wide = picture(*SQUARE, seed=60), picture(*WIDE, seed=61)
    asks = [
        Ask(text_ids(120, 70)),
        with_images(60, [square], 40, 71),
        with_images(62, [wide], 40, 72),
        Ask(text_ids(200, 73)),
        with_images(63, [square], 41, 74),
        with_images(61, [square, wide], 40, 75),
        with_images(60, [picture(*SQUARE, seed=62)], 40, 76),
        Ask(text_ids(60, 77)),
    ]

    def check() -> tuple[bool, str]:
        alone = [engine.cold(ask) for ask in asks]
        engine.forget()
        together = engine.ask(*asks)
        moved = [a.distance(b) for a, b in zip(alone, together, strict=True)]
        kinds = [bool(ask.pictures) for ask in asks]
        image = max(m for m, kind in zip(moved, kinds, strict=True) if kind)
        text = max(m for m, kind in zip(moved, kinds, strict=True) if not kind)
        same = sum(a.tokens == b.tokens for a, b in zip(alone, together, strict=True))
        detail = f"tokens equal for {same} of 8, first token moved {image:.3g}, text {text:.3g}"
        return image <= 2 * text + SLACK, detail

    report.run("8 concurrent requests equal alone", check)


def preemption(engine: Engine, judge: Judge) -> None:
    def interrupted(steps: int, chunk: int) -> Callable[[Ask], tuple[Answer, Answer, str]]:
        def treat(ask: Ask) -> tuple[Answer, Answer, str]:
            cold = engine.cold(ask)
            engine.forget()
            before = encoder_runs(engine)
            with engine.chunks_of(chunk):
                warm = preempted(engine, ask, steps)
            return cold, warm, f"; encoder ran {encoder_runs(engine) - before} times"

        return treat

    image, text = long_pair()
    judge.row("preempted while generating", interrupted(3, 2048), image, text)
    judge.row("preempted between prefill chunks", interrupted(1, 985), image, text)


def preempted(engine: Engine, ask: Ask, steps: int, max_tokens: int = 8) -> Answer:
    """Runs ``steps`` steps, throws the running request out of the KV cache, and lets it finish."""
    from gpu.rig import _answer

    inner = engine.llm.llm_engine
    inner.add_request("preempted", ask.prompt(), engine.params(max_tokens))
    done: list = []
    for _ in range(steps):
        done += inner.step()
    if not engine.llm.reset_prefix_cache(reset_running_requests=True):
        raise RuntimeError("the request was not preempted")
    while inner.has_unfinished_requests():
        done += inner.step()
    return _answer([output for output in done if output.finished][-1])


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


def count_encoder(engine: Engine) -> None:
    """Counts the pictures that go through the tower from now on."""
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
    return engine.model._encoder_runs


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
