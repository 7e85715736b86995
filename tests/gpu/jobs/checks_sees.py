"""What a checkpoint that sees answers: right or wrong, and whether it answers as it does alone.

    checks_sees.py MODEL MODE REPORT.json ANSWERS.json SECONDS

MODE is eager, graphs or draft. SECONDS: no check begins later than this after the engine started;
those that were not reached have a row that says so. The most valuable come first. ANSWERS gets each
question's right answer and tokens, for compare_sees.py.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from gpu.checkpoint.sees import answer_words, by_question, reach_goals, read_recipe
from gpu.jobs.checks_visibility import causal
from gpu.lib import sights
from gpu.lib.accuracy import as_alone, differing
from gpu.lib.rig import Ask, Engine, Report
from gpu.lib.sights import QUESTIONS, Asked, Sight

#: A row of accuracy alone is given this share of the time; what it did not reach it says.
ALONE_SHARE = 0.4
#: Questions of the rows beside "alone", and of the rows that empty the caches for each question.
SOME, FEW = 300, 60
#: vLLM's scheduler takes this many requests a step here.
AT_ONCE = 32
MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "graphs": {
        "enforce_eager": False,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]},
    },
    "draft": {"speculative_config": {"method": "dspark", "num_speculative_tokens": 6}},
}


class Questions:
    """Held-out questions, asked of one engine in many ways; ``alone`` are the first answers."""

    def __init__(self, engine: Engine, pictures: Sequence[Sight], asked: Sequence[Asked]) -> None:
        self.engine, self.pictures, self.asked = engine, pictures, list(asked)
        self.alone: list[tuple[int, ...]] = []
        self.repeats = 0.0
        #: Prompt tokens that came from the prefix cache so far.
        self.cached = 0

    def prompt(self, each: Asked, upside_down: bool = False) -> dict[str, Any]:
        images = [self.pictures[number].image for number in each.sights]
        if upside_down:
            images = [image.rotate(180) for image in images]
        return Ask(sights.token_ids(each), tuple(images)).prompt()

    def answers(self, asked: Sequence[Asked], **changes: bool) -> list[tuple[int, ...]]:
        """Greedy tokens of questions that are submitted together: the answer and the end token."""
        prompts = [self.prompt(each, **changes) for each in asked]
        outputs = self.engine.llm.generate(prompts, params(), use_tqdm=False)
        self.cached += sum(output.num_cached_tokens or 0 for output in outputs)
        return [tuple(output.outputs[0].token_ids) for output in outputs]

    def together(self, asked: Sequence[Asked], size: int, **changes: bool) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for start in range(0, len(asked), size):
            found += self.answers(asked[start : start + size], **changes)
        return found

    def take_alone(self, until: float) -> tuple[bool, str]:
        """Accuracy of one request at a time. Good where every question reaches its goal."""
        for start in range(0, len(self.asked), len(QUESTIONS)):
            if time.monotonic() > until:
                break
            for each in self.asked[start : start + len(QUESTIONS)]:
                self.alone += self.answers([each])
        asked = self.asked[: len(self.alone)]
        scores = by_question(asked, [tokens[0] for tokens in self.alone])
        left = len(self.asked) - len(asked)
        reached = f"; {left} questions were not reached" if left else ""
        return reach_goals(scores), answer_words(asked, self.alone) + reached

    def take_repeats(self) -> tuple[bool | None, str]:
        count = min(SOME, len(self.alone))
        self.engine.forget()
        again = self.together(self.asked[:count], 1)
        self.repeats = differing(self.alone[:count], again)
        return None, f"{self.repeats:.1%} of {count} answers differ between two runs alone"

    def beside(self, ask: Callable[[Sequence[Asked]], list[tuple[int, ...]]], count: int) -> Any:
        """A check: the first ``count`` questions asked otherwise, held against alone."""

        def check() -> tuple[bool, str]:
            asked = self.asked[: min(count, len(self.alone))]
            given = ask(asked)
            share = differing(self.alone[: len(asked)], given)
            words = f"{share:.1%} of {len(asked)} answers differ from alone"
            return as_alone(share, self.repeats), f"{words}; {answer_words(asked, given)}"

        return check

    def control(self, ask: Callable[[Sequence[Asked]], list[tuple[int, ...]]]) -> Any:
        """A check: with something wrong, some question is answered worse by more than a tenth."""

        def check() -> tuple[bool, str]:
            asked = self.asked[: min(SOME, len(self.alone))]
            self.engine.forget()
            given = ask(asked)
            right = by_question(asked, [tokens[0] for tokens in self.alone[: len(asked)]])
            wrong = by_question(asked, [tokens[0] for tokens in given])
            worse = max(right[name].right - wrong[name].right for name in right)
            return worse > 0.1, f"worse by up to {worse:.1%}; {answer_words(asked, given)}"

        return check


def params() -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=2)


@contextmanager
def without_bias(engine: Engine) -> Iterator[None]:
    """``bias_vl`` is zero: image rows choose experts by their plain scores."""
    found = [p for n, p in engine.model.named_parameters() if n.endswith("bias_vl")]
    if not found:
        raise RuntimeError("no bias_vl in the model")
    kept = [each.detach().clone() for each in found]
    with torch.no_grad():
        try:
            for each in found:
                each.zero_()
            yield
        finally:
            for each, value in zip(found, kept, strict=True):
                each.copy_(value)


def main(folder: str, mode: str, report_path: str, answers_path: str, seconds: str) -> int:
    report = Report(Path(report_path))
    plan, recipe = read_recipe(Path(folder))
    pictures = plan.pictures()
    held_out = plan.split(pictures)[1]
    order = {number: place for place, number in enumerate(range(plan.fit, len(pictures)))}
    # Picture by picture, so that what time allows has all questions.
    held_out.sort(key=lambda each: (min(order[n] for n in each.sights), each.question.name))
    engine = Engine(folder, max_num_batched_tokens=8192, max_num_seqs=AT_ONCE, **MODES[mode])
    questions = Questions(engine, pictures, held_out)
    begun, limit = time.monotonic(), float(seconds)  # a start takes as long as kernels are new
    report.add(f"{mode}: the reference on the same pictures", None, json.dumps(recipe["held_out"]))

    def run(name: str, check: Callable[[], tuple[bool | None, str]]) -> None:
        if time.monotonic() - begun > limit:
            report.add(f"{mode}: {name}", None, "not reached: no time left")
            return
        report.run(f"{mode}: {name}", check)

    until = begun + limit * (ALONE_SHARE if mode == "eager" else 0.9)
    run("accuracy alone", lambda: questions.take_alone(until))
    pairs = [(each.answer, *given) for each, given in zip(held_out, questions.alone, strict=False)]
    Path(answers_path).write_text(json.dumps(pairs))
    if mode == "eager":
        others(engine, questions, run)
    return 0


def others(engine: Engine, questions: Questions, run: Callable[[str, Any], None]) -> None:
    """Every other way to be asked, and what must answer worse."""

    def fresh(asked: Sequence[Asked], size: int) -> list[tuple[int, ...]]:
        engine.forget()
        return questions.together(asked, size)

    def chunked(tokens: int) -> Callable[[Sequence[Asked]], list[tuple[int, ...]]]:
        def ask(asked: Sequence[Asked]) -> list[tuple[int, ...]]:
            with engine.chunks_of(tokens):
                return fresh(asked, AT_ONCE)

        return ask

    def again(asked: Sequence[Asked]) -> list[tuple[int, ...]]:
        questions.together(asked, 1)
        before = questions.cached
        found = questions.together(asked, 1)
        if questions.cached == before:
            raise RuntimeError("nothing came from the prefix cache")
        return found

    def encoded(asked: Sequence[Asked]) -> list[tuple[int, ...]]:
        found = []
        for each in asked:
            questions.answers([each])
            if not engine.llm.reset_prefix_cache():
                raise RuntimeError("the prefix cache could not be emptied")
            found += questions.answers([each])
        return found

    def preempted(asked: Sequence[Asked]) -> list[tuple[int, ...]]:
        return [interrupted(engine, questions.prompt(each)) for each in asked]

    def with_causal(asked: Sequence[Asked]) -> list[tuple[int, ...]]:
        with causal(engine):
            return questions.together(asked, AT_ONCE)

    def unbiased(asked: Sequence[Asked]) -> list[tuple[int, ...]]:
        with without_bias(engine):
            return questions.together(asked, AT_ONCE)

    run("two runs alone", questions.take_repeats)
    run("8 at once", questions.beside(lambda asked: fresh(asked, 8), SOME))
    run("32 at once", questions.beside(lambda asked: fresh(asked, AT_ONCE), SOME))
    for name, control in (
        ("upside down", lambda asked: questions.together(asked, AT_ONCE, upside_down=True)),
        ("bias_vl off", unbiased),
        ("causal spans", with_causal),
    ):
        run(f"control, {name}", questions.control(control))
    run("from the prefix cache", questions.beside(again, FEW))
    run("from the encoder cache", questions.beside(encoded, FEW))
    run("after preemption", questions.beside(preempted, FEW))
    for tokens in (512, 2048, 8192):
        run(f"chunks of {tokens}", questions.beside(chunked(tokens), SOME))


def interrupted(engine: Engine, prompt: dict[str, Any]) -> tuple[int, ...]:
    """The tokens of a request that was thrown out of the KV cache after its first step."""
    engine.forget()
    inner = engine.llm.llm_engine
    inner.add_request("interrupted", prompt, params())
    done = list(inner.step())
    if not engine.llm.reset_prefix_cache(reset_running_requests=True):
        raise RuntimeError("the request was not preempted")
    while inner.has_unfinished_requests():
        done += inner.step()
    return tuple([output for output in done if output.finished][-1].outputs[0].token_ids)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
