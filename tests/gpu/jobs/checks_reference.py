"""Embeddings, experts and hidden states of the patched vLLM against a float32 computation.

    checks_reference.py MODEL REPORT.json

The language model's linears run in FP8 with rounded activations, so a distance remains on any
prompt. Text shows its size; the same distance is wanted where images are, and a clearly larger one
when the reference leaves out an image rule.

Repeats of a cold prompt differ, a single row by a tenth of its distance, so every row's distance is
the median of several runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu.lib.capture import Captured, capture, row_error, same_experts
from gpu.lib.loading import DRAFTS, assess_loading, hash_biases, names_in, watched_loading
from gpu.lib.rig import (
    SQUARE,
    WIDE,
    Ask,
    Engine,
    Report,
    random_image,
    text_ids,
    with_images,
)
from gpu.reference.image import KINDS, SENTINEL_FIRST, patches_of
from gpu.reference.lm import Prompt, ReferenceLM, Result
from gpu.reference.vision import ReferenceVision

#: BF16 tower against float32: relative distance of the rows it hands to the language model.
EMBED_LIMIT = 0.03
#: Share of equal choices: rounding swaps experts whose scores nearly tie.
EXPERTS = 0.85
#: An image row may be this much further from the reference than a text row.
ROW_FACTOR = 1.5
#: Kinds with few rows in an image, and the share of a text prompt's rows that bounds such a row.
FEW, SINGLE = ("START", "PAD", "END"), 0.95
#: Cold runs of each prompt.
RUNS = 5


def asks() -> dict[str, Ask]:
    square, wide = random_image(*SQUARE, seed=1), random_image(*WIDE, seed=2)
    return {
        "text of 300": Ask(text_ids(300, 3)),
        "one square image": with_images(60, [square], 40, 4),
        "a wide and a square image": with_images(61, [wide, square], 62, 5),
    }


def twins() -> dict[str, Ask]:
    """Texts as long as the prompts with images."""
    return {"text of 217": Ask(text_ids(217, 6)), "text of 627": Ask(text_ids(627, 7))}


def main(folder: str, report_path: str) -> int:
    report = Report(Path(report_path))
    with watched_loading() as loads:
        engine = Engine(folder)
    names, homeless = names_in(Path(folder)), DRAFTS | hash_biases(Path(folder))
    report.run("all tensors are loaded", lambda: assess_loading(names, loads, homeless))
    runs = {name: [run(engine, ask) for _ in range(RUNS)] for name, ask in asks().items()}
    checks = Comparison(Path(folder), report)
    for name, ask in asks().items():
        checks.assess(name, ask, runs[name])
    return 0


def run(engine: Engine, ask: Ask) -> Captured:
    with capture(engine.model) as found:
        engine.cold(ask, max_tokens=1)
    return found


class Comparison:
    """Reference models of one checkpoint, and the text rows' distance as the yardstick."""

    def __init__(self, folder: Path, report: Report, device: str = "cuda") -> None:
        self.report = report
        config = json.loads((folder / "config.json").read_text())
        self.config = config
        self.vision = ReferenceVision(folder, config, device=device)
        self.lm = ReferenceLM(folder, device=device)
        self.text = torch.full((1,), torch.nan)

    def assess(self, name: str, ask: Ask, runs: Sequence[Captured]) -> None:
        images = [patches_of(image, self.config) for image in ask.images]
        prompt = self.vision.prompt(ask.ids, images)
        if images:
            self.report.run(f"{name}: embeddings", lambda: self._embeddings(prompt, runs[0]))
        right = self.lm(prompt)
        if not images:
            self.text = middle_errors(runs, right)
            middle = float(self.text.median())
            detail = f"median row distance {middle:.4f}; here and below of {RUNS} runs each"
            self.report.add(f"{name}: hidden state near float32", middle < 0.2, detail)
            return
        others = {
            "causal": self.lm(prompt, visibility=False),
            "text routing": self.lm(prompt, image_routing=False),
        }
        self.report.run(f"{name}: hidden state", lambda: self._hidden(prompt, runs, right, others))
        self.report.run(f"{name}: experts", lambda: self._experts(prompt, runs[0], right, others))

    def _embeddings(self, prompt: Prompt, found: Captured) -> tuple[bool, str]:
        count = len(prompt.ids)
        embeds = torch.cat(found.embeds)[:count]
        errors = row_error(embeds, prompt.embeds.cpu())
        text, image = errors[~prompt.image_rows], errors[prompt.image_rows]
        same_ids = torch.equal(torch.cat(found.ids)[:count].long(), prompt.ids)
        detail = (
            f"{count} rows, ids equal: {same_ids}, text rows at most {float(text.max()):.2g}, "
            f"image rows at most {float(image.max()):.4f} (median {float(image.median()):.4f})"
        )
        good = same_ids and float(text.max()) == 0 and float(image.max()) < EMBED_LIMIT
        return good, detail

    def _hidden(
        self,
        prompt: Prompt,
        runs: Sequence[Captured],
        right: Result,
        others: dict[str, Result],
    ) -> tuple[bool, str]:
        wrong = {name: middle_errors(runs, other) for name, other in others.items()}
        return assess_hidden(prompt.ids, middle_errors(runs, right), wrong, self.text)

    def _experts(
        self, prompt: Prompt, found: Captured, right: Result, others: dict[str, Result]
    ) -> tuple[bool, str]:
        rows, count = prompt.image_rows, len(prompt.ids)
        layers = range(len(right.experts))

        def share(reference: Result, mask: torch.Tensor) -> list[float]:
            return [
                same_experts(found.layer(i)[:count][mask], reference.experts[i].cpu()[mask])
                for i in layers
            ]

        image, text = share(right, rows), share(right, ~rows)
        plain = share(others["text routing"], rows)
        words = [
            f"layer {i}: image {image[i]:.3f} (text rule {plain[i]:.3f}), text {text[i]:.3f}"
            for i in layers
        ]
        good = min(*image, *text) > EXPERTS and max(plain) < min(image) - 0.1
        return good, "share of equal experts; " + "; ".join(words)


def middle_errors(runs: Sequence[Captured], reference: Result) -> torch.Tensor:
    """(n,): each row's distance of the last hidden state, the median of the runs."""
    last = reference.last.cpu()
    errors = [row_error(torch.cat(run.hidden)[: len(last)], last) for run in runs]
    return torch.stack(errors).median(dim=0).values


def assess_hidden(
    ids: torch.Tensor, mine: torch.Tensor, wrong: dict[str, torch.Tensor], text: torch.Tensor
) -> tuple[bool, str]:
    """Rows of every kind are as near to float32 as a text prompt's, and not to wrong references.

    ``ids`` (n,) of the prompt; distances of its rows (n,) to the reference, to ``wrong`` ones that
    leave out an image rule, and of a ``text`` prompt's rows to its own. Judged by each kind of
    image token, by the median of its rows.
    """
    middle, single = float(text.median()), float(text.quantile(SINGLE))
    limits = {
        name: max(ROW_FACTOR * middle, single) if name in FEW else ROW_FACTOR * middle
        for name in KINDS
    }
    kinds = kind_medians(ids, mine)
    others = {name: kind_medians(ids, errors) for name, errors in wrong.items()}
    rest = float(mine[_kind(ids) < 0].median())
    near = all(value < limits[name] for name, value in kinds.items())
    near = near and rest < ROW_FACTOR * middle and set(kinds) == set(KINDS)
    apart = all(found["IMAGE"] > 1.5 * kinds["IMAGE"] for found in others.values())
    for rule, found in others.items():
        # What comes before START sees no image, with the rule or without.
        shown = {name for name in kinds if (rule, name) != ("causal", "PAD")}
        apart = apart and all(found[name] > kinds[name] for name in shown)
    worst = max(kinds, key=lambda name: kinds[name] / limits[name])
    words = [
        f"{name} {value:.4f} ("
        + ", ".join(f"{rule} {found[name]:.4f}" for rule, found in others.items())
        + ")"
        for name, value in kinds.items()
    ]
    detail = (
        f"median distances, in brackets to references without a rule: {', '.join(words)}, text "
        f"rows {rest:.4f}; a text prompt's {middle:.4f}, {SINGLE:.0%} of its rows within "
        f"{single:.4f}; nearest to its limit: {worst}, {kinds[worst] / limits[worst]:.0%}"
    )
    return near and apart, detail


def kind_medians(ids: torch.Tensor, errors: torch.Tensor) -> dict[str, float]:
    """Median of ``errors`` (n,) over the rows of each kind of image token that ``ids`` have."""
    kinds = _kind(ids)
    return {
        name: float(errors[kinds == kind].median())
        for kind, name in enumerate(KINDS)
        if bool((kinds == kind).any())
    }


def _kind(ids: torch.Tensor) -> torch.Tensor:
    """Number of each token's kind; -1 for text."""
    kinds = ids - SENTINEL_FIRST
    return torch.where((kinds >= 0) & (kinds < len(KINDS)), kinds, -1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
