"""Fits a random checkpoint so that its answers depend on the picture, in closed form.

``aligner.w2`` is a ridge regression from the aligner's rows to what each cell shows, laid onto a
few orthogonal directions, of which the loudest is what the answering row's queries look for;
attention is made sharper by scales; the output head is a ridge regression from the last row to the
answer, and from the row after it to the end token, with the rounding of FP8. Features come from the
float32 reference in tests/gpu/reference, never from the code under test. Accuracy is that of what
was written, read back from the folder.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from gpu.checkpoint import inplace, noise
from gpu.checkpoint.aligner import directions, fit_cells, lay, rescale, sought
from gpu.checkpoint.eyes import Eyes
from gpu.checkpoint.memory import check_memory
from gpu.checkpoint.ridge import NotFitted, Ridge
from gpu.lib import sights
from gpu.lib.accuracy import Score, score
from gpu.lib.sights import QUESTIONS, Asked, Sight
from gpu.reference.lm import ReferenceLM
from gpu.reference.vision import ReferenceVision

RECIPE = "sees.json"
#: The head's penalty, see `Ridge`; the end token needs a hundredth or more.
HEAD_STRENGTH = 1e-1
#: Logit of the right answer, so that rounding to bfloat16 does not decide.
LOUDNESS = 20.0
#: Held-out accuracy must be this far above always giving the commonest answer.
MARGIN = 0.05
#: Pictures of the controls, each of which runs the reference once more.
CONTROL_PICTURES = 100


@dataclass(frozen=True)
class Plan:
    """Counts of pictures and their sizes; what the head and the aligner are fitted with."""

    seed: int = 0
    fit: int = 1200
    held_out: int = 500
    sizes: tuple[tuple[int, int], ...] = sights.SIZES
    batch: int = 32

    def pictures(self) -> list[Sight]:
        count = self.fit + self.held_out
        with ThreadPoolExecutor(16) as pool:
            return list(
                pool.map(lambda number: sights.sight(number, self.seed, self.sizes), range(count))
            )

    def split(self, pictures: Sequence[Sight]) -> tuple[list[Asked], list[Asked]]:
        """Questions to fit with, and held-out ones, of other pictures."""
        held = range(self.fit, self.fit + self.held_out)
        return (
            sights.questions(pictures, range(self.fit), self.seed),
            sights.questions(pictures, held, self.seed),
        )


def fit(folder: Path, plan: Plan, device: str) -> dict[str, Score]:
    """Fits the random checkpoint in ``folder`` in place; returns held-out scores by question.

    Raises NotFitted, or TooLittleMemory before anything changes. A fit that was cut off or refused
    leaves a folder without config.json, which nothing serves.
    """
    text = (folder / "config.json").read_text()
    config = json.loads(text)
    if (folder / RECIPE).exists() or not config.get("vision_n_layers"):
        raise NotFitted(
            f"{folder} is not a random checkpoint with vision; nothing was changed; "
            "write one with tiny_checkpoint.py and fit that"
        )
    check_memory(folder, device)
    (folder / "config.json").unlink()
    rescale(folder, config)
    begun = time.monotonic()
    pictures = plan.pictures()
    for_fit, held_out = plan.split(pictures)
    (folder / "config.json.fitting").write_text(text)
    with _config_at(folder, text), fast_matmul():
        _fit(folder, config, pictures, for_fit, plan, device)
        # The reference's gates and the reference hold each other, so nothing else frees its memory.
        gc.collect()
        scores, controls = read_back(folder, config, pictures, held_out, plan, device)
        check(scores)
    recipe = {
        "plan": asdict(plan),
        "seconds": round(time.monotonic() - begun, 1),
        "held_out": {name: asdict(each) for name, each in scores.items()},
        "controls": controls,
    }
    (folder / RECIPE).write_text(json.dumps(recipe, indent=1) + "\n")
    (folder / "config.json.fitting").rename(folder / "config.json")
    return scores


def _fit(
    folder: Path,
    config: dict,
    pictures: Sequence[Sight],
    asked: Sequence[Asked],
    plan: Plan,
    device: str,
) -> None:
    """Writes the aligner's last matrix and the head."""
    eyes = Eyes(ReferenceVision(folder, config, device=device), pictures)
    model = ReferenceLM(folder, device=device, eps=config["rms_norm_eps"])
    cells = fit_cells(eyes, plan.fit)
    hidden = len(eyes.vision.weights["aligner.w2.bias"])
    lay(folder, eyes.vision, cells, directions(hidden, plan.seed))
    lay(folder, eyes.vision, cells, directions(hidden, plan.seed, sought(model, eyes, asked)))
    write_head(folder, fit_head(model, eyes, asked, plan))


def read_back(
    folder: Path,
    config: dict,
    pictures: Sequence[Sight],
    asked: Sequence[Asked],
    plan: Plan,
    device: str,
) -> tuple[dict[str, Score], dict[str, dict[str, float]]]:
    """Scores of what the folder holds, with the rounding of FP8, and the controls' accuracies."""
    eyes = Eyes(ReferenceVision(folder, config, device=device), pictures)
    model = ReferenceLM(folder, device=device, eps=config["rms_norm_eps"])
    with noise.quantised(model):
        scores = scored(model, eyes, asked, plan)
    few = [each for each in asked if max(each.sights) < plan.fit + CONTROL_PICTURES]
    return scores, controlled(model, eyes, few, plan)


@contextmanager
def fast_matmul() -> Iterator[None]:
    """TF32 on a GPU: a thousandth off, where FP8 serving is a hundredth off."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class _config_at:
    """The config in place while the reference reads the folder, and gone at the end."""

    def __init__(self, folder: Path, text: str) -> None:
        self.path, self.text = folder / "config.json", text

    def __enter__(self) -> None:
        self.path.write_text(self.text)

    def __exit__(self, *_: object) -> None:
        self.path.unlink()


def read_recipe(folder: Path) -> tuple[Plan, dict]:
    """How the checkpoint in ``folder`` was fitted. NotFitted for one of another kind."""
    path = folder / RECIPE
    if not path.exists() or not (folder / "config.json").exists():
        raise NotFitted(
            f"{folder} is not a checkpoint that sees (no {RECIPE}); nothing was asked; "
            "next: tiny_checkpoint.py FOLDER --vision-layers 32 --sees"
        )
    kept = json.loads(path.read_text())
    plan = kept["plan"] | {"sizes": tuple(tuple(size) for size in kept["plan"]["sizes"])}
    return Plan(**plan), kept


def answer_tokens() -> list[int]:
    """The tokens that the head knows: every answer, then the end token."""
    letters = "".join(question.answers for question in QUESTIONS)
    return [*map(sights.token, letters), sights.END_TOKEN]


def fit_head(model: ReferenceLM, eyes: Eyes, asked: Sequence[Asked], plan: Plan) -> torch.Tensor:
    """(tokens, hidden) float32 rows of `answer_tokens`, rounded as the file has them."""
    tokens = answer_tokens()
    device = str(model.head.device)
    ridge = Ridge(model.head.shape[1], len(tokens), device)
    with noise.quantised(model):
        for part, prompts in eyes.batches(asked, plan.batch):
            last = model.last(prompts)
            places = [tokens.index(sights.token(each.answer)) for each in part]
            ends = [len(tokens) - 1] * len(part)
            for rows, wanted in ((last[:, -2], places), (last[:, -1], ends)):
                ridge.add(rows, torch.nn.functional.one_hot(torch.tensor(wanted), len(tokens)))
    return (ridge.solve(HEAD_STRENGTH).T * LOUDNESS).bfloat16().float()


def write_head(folder: Path, head: torch.Tensor) -> None:
    """All rows but the fitted ones are zero: a token that is no answer has the logit 0."""
    whole = torch.zeros_like(inplace.read(folder, "head.weight"))
    whole[torch.tensor(answer_tokens())] = head.cpu().to(whole.dtype)
    inplace.replace(folder, "head.weight", whole)


def answered(
    model: ReferenceLM,
    eyes: Eyes,
    asked: Sequence[Asked],
    plan: Plan,
    **rules: bool,
) -> tuple[list[Asked], list[int], list[bool]]:
    """The questions in the order they ran, the tokens given, and whether the end token follows."""
    order: list[Asked] = []
    given: list[int] = []
    ended: list[bool] = []
    for part, prompts in eyes.batches(asked, plan.batch):
        last = model.last(prompts, **rules)
        chosen = (last[:, -2:] @ model.head.T).argmax(-1).cpu()
        order += part
        given += chosen[:, 0].tolist()
        ended += (chosen[:, 1] == sights.END_TOKEN).tolist()
    return order, given, ended


def scored(
    model: ReferenceLM,
    eyes: Eyes,
    asked: Sequence[Asked],
    plan: Plan,
    **rules: bool,
) -> dict[str, Score]:
    order, given, _ = answered(model, eyes, asked, plan, **rules)
    return by_question(order, given)


def by_question(order: Sequence[Asked], given: Sequence[int]) -> dict[str, Score]:
    """Scores of the questions that were asked."""
    found = {}
    for question in QUESTIONS:
        pairs = [
            (token, sights.token(each.answer))
            for each, token in zip(order, given, strict=True)
            if each.question == question
        ]
        if pairs:
            mine, wanted = zip(*pairs, strict=True)
            found[question.name] = score(mine, wanted, len(question.answers))
    return found


def reach_goals(scores: dict[str, Score]) -> bool:
    """Whether every question was asked and reaches its goal."""
    goals = {question.name: question.goal for question in QUESTIONS}
    return len(scores) == len(goals) and all(s.right >= goals[n] for n, s in scores.items())


def answer_words(asked: Sequence[Asked], given: Sequence[tuple[int, ...]]) -> str:
    """Scores of greedy tokens, the answer and the end token, and how many end."""
    scores = by_question(asked, [tokens[0] for tokens in given])
    ended = sum(tokens[1:] == (sights.END_TOKEN,) for tokens in given) / len(given)
    words = "; ".join(f"{name} {each.words()}" for name, each in scores.items())
    return f"{words}; {ended:.1%} end after the answer"


def controlled(
    model: ReferenceLM, eyes: Eyes, asked: Sequence[Asked], plan: Plan
) -> dict[str, dict[str, float]]:
    """Accuracy of the reference with one thing wrong, by control and question."""
    vision, pictures = eyes.vision, eyes.pictures
    wrong: dict[str, Callable[[], dict[str, Score]]] = {
        "bias_vl off": lambda: scored(model, eyes, asked, plan, image_routing=False),
        "causal spans": lambda: scored(model, eyes, asked, plan, visibility=False),
        "not permuted": lambda: scored(model, Eyes(vision, pictures, permuted=False), asked, plan),
        "START and END swapped with pads": lambda: scored(
            model, Eyes(vision, pictures, swapped=True), asked, plan
        ),
        "upside down": lambda: scored(model, Eyes(vision, pictures, upside_down=True), asked, plan),
    }
    return {name: {q: s.right for q, s in run().items()} for name, run in wrong.items()}


def check(scores: dict[str, Score]) -> None:
    """NotFitted unless every question is answered better than by its commonest answer."""
    poor = [
        f"{name} {each.words()}"
        for name, each in scores.items()
        if not each.right > max(each.majority, each.guess) + MARGIN
    ]
    if poor or not scores:
        figures = "; ".join(poor) or "nothing asked"
        raise NotFitted(
            f"the fit is no better than the commonest answer: {figures}; nothing can be served "
            "from the folder; take more pictures or another seed"
        )
