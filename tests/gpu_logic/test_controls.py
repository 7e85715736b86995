"""What decides whether answers with graphs or drafts are those without, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from gpu.jobs import checks_draft, checks_graphs
from gpu.jobs.checks_eps import differences
from gpu.lib import controls
from gpu.lib.answers import PROBED, Answer

IMAGE, TEXT = "one square image", "text of 217"


def answer(*tokens: int, at: tuple[float, float] = (0, 0)) -> Answer:
    """Both steps' log-probabilities over three tokens; ``at`` moves the first token's."""
    rows = [{3: -1.0 + moved, 4: -2.0, 5: -3.0} for moved in at]
    return Answer(list(tokens), rows)


def groups(**image: Answer) -> dict[str, controls.Group]:
    """A text whose repeats are 0.3 apart, and an image prompt with its controls."""
    text = [answer(3, 4), answer(3, 4, at=(0.3, 0.3))]
    others = {name: [found] for name, found in image.items()}
    return {
        TEXT: controls.Group(text),
        IMAGE: controls.Group([answer(3, 4), answer(4, 4)], others),
    }


def assessed(image: Answer, **others: Answer) -> tuple[bool, str]:
    known = groups(**(others or {"other": answer(5, 5, at=(2, 2))}))
    return controls.beside(IMAGE, known, {TEXT: [answer(3, 4)], IMAGE: [image]})


def test_answers_are_grouped_by_prompt_and_control() -> None:
    one, two, other = answer(3), answer(4), answer(5)
    found = controls.grouped({f"{IMAGE}#0": one, f"{IMAGE}#1": two, f"{IMAGE}/off#0": other})
    assert found == {IMAGE: controls.Group([one, two], {"off": [other]})}


@pytest.mark.parametrize(
    ("found", "good"),
    [
        (answer(3, 4), True),
        (answer(3, 4, at=(0.2, 0.2)), True),
        (answer(3, 4, at=(1.0, 0)), False),
        (answer(3, 4, at=(0, 1.0)), False),
        (answer(5, 4), False),
    ],
    ids=["equal", "as near as text", "first token", "second token", "begins otherwise"],
)
def test_both_tokens_have_to_be_near_and_begin_alike(found: Answer, good: bool) -> None:
    same, words = assessed(found)
    assert same is good, words


def test_a_control_as_near_as_text_decides_nothing() -> None:
    same, words = assessed(answer(3, 4), off=answer(5, 5, at=(0.1, 0)))
    assert not same
    assert "undecidable" in words


def test_equal_modes_in_a_row_are_counted() -> None:
    assert checks_graphs.runs(["NONE", "FULL", "FULL"]) == ["1 NONE", "2 FULL"]


class Dispatcher:
    def __init__(self, modes: list[str]) -> None:
        self.modes = iter(modes)

    def dispatch(self) -> tuple[SimpleNamespace, None]:
        return SimpleNamespace(name=next(self.modes)), None


def test_the_mode_that_a_step_took_last_counts() -> None:
    dispatcher = Dispatcher(["FULL", "NONE", "FULL", "PIECEWISE"])

    def execute() -> None:
        dispatcher.dispatch()
        dispatcher.dispatch()

    runner = SimpleNamespace(cudagraph_dispatcher=dispatcher, execute_model=execute)
    with checks_graphs.dispatched(SimpleNamespace(runner=runner)) as modes:
        runner.execute_model()
        runner.execute_model()
    assert modes == ["NONE", "PIECEWISE"]
    assert runner.execute_model is execute


def test_an_earlier_answer_is_offered_with_one_token_changed() -> None:
    tokens = list(PROBED)[:8]
    own = torch.zeros(1, 6, dtype=torch.int64)
    speculator = SimpleNamespace(propose=lambda *_: own.clone())
    engine = SimpleNamespace(runner=SimpleNamespace(speculator=speculator))

    def step(sampled: int) -> list[int]:
        return speculator.propose(*[None] * 5, torch.tensor([sampled]))[0].tolist()

    with checks_draft.offering(engine, tokens):
        first, second = step(1), step(4)
    changed = checks_draft.CHANGED
    assert [a == b for a, b in zip(first, tokens[1:7], strict=True)] == [
        index != changed for index in range(1, 7)
    ]
    assert second == [*tokens[5:], 0, 0, 0]


@pytest.mark.parametrize(
    ("own", "accepted", "good"),
    [(30, 12, True), (0, 12, False), (30, 0, False), (30, 24, False)],
    ids=["both", "nothing drafted", "nothing accepted", "nothing refused"],
)
def test_offered_tokens_have_to_be_accepted_and_refused(
    own: int, accepted: int, good: bool
) -> None:
    drafted = {name: checks_draft.Drafted() for name in ("its own", "an earlier answer")}
    drafted["its own"].offered = own
    drafted["an earlier answer"].offered, drafted["an earlier answer"].accepted = 24, accepted
    assert checks_draft.both_ways(drafted)[0] is good


def test_differences_are_of_the_nearest_and_the_furthest_pair() -> None:
    rows = [torch.tensor([0.0, 1.0]), torch.tensor([0.5, 1.0]), torch.tensor([0.0, 3.0])]
    assert differences([(rows[0], rows[1]), (rows[0], rows[2])]) == (0.5, 2.0)
