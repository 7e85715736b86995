"""Embeddings, experts and hidden states of the patched vLLM against a float32 computation.

    checks_reference.py MODEL REPORT.json ANSWERS.json

The language model's linears run in FP8 with rounded activations, so a distance remains on any
prompt. Text shows its size; the same distance is wanted where images are, and a clearly larger one
when the reference leaves out an image rule.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.answers import Answer, save_answers
from gpu.capture import Captured, capture, row_error, same_experts
from gpu.reference_lm import Prompt, ReferenceLM, Result
from gpu.reference_vision import ReferenceVision
from gpu.rig import (
    SQUARE,
    WIDE,
    Ask,
    Engine,
    Report,
    picture,
    text_ids,
    with_images,
)

from vision_exp.config import VisionConfig
from vision_exp.image import image_to_patches

#: BF16 tower against float32: relative distance of the rows it hands to the language model.
EMBED_LIMIT = 0.03
#: Share of equal choices: rounding swaps experts whose scores nearly tie.
EXPERTS = 0.85
#: An image row may be this much further from the reference than a text row.
ROW_FACTOR = 1.5


def asks() -> dict[str, Ask]:
    square, wide = picture(*SQUARE, seed=1), picture(*WIDE, seed=2)
    return {
        "text of 300": Ask(text_ids(300, 3)),
        "one square image": with_images(60, [square], 40, 4),
        "a wide and a square image": with_images(61, [wide, square], 62, 5),
    }


def twins() -> dict[str, Ask]:
    """Texts as long as the prompts with images."""
    return {"text of 217": Ask(text_ids(217, 6)), "text of 627": Ask(text_ids(627, 7))}


def main(folder: str, report_path: str, answers_path: str) -> int:
    report = Report(Path(report_path))
    engine = Engine(folder, probed=True)
    taken: dict[str, Captured] = {}
    answers: dict[str, Answer] = {}
    for name, ask in asks().items():
        engine.forget()
        with capture(engine.model) as found:
            engine.ask(ask, max_tokens=1)
        taken[name] = found
        answers[name] = engine.cold(ask)
    answers |= {name: engine.cold(ask) for name, ask in twins().items()}
    save_answers(Path(answers_path), answers)
    checks = Comparison(Path(folder), report)
    for name, ask in asks().items():
        checks.judge(name, ask, taken[name])
    return 0


class Comparison:
    """Reference models of one checkpoint, and the text rows' distance as the yardstick."""

    def __init__(self, folder: Path, report: Report, device: str = "cuda") -> None:
        self.report = report
        config = json.loads((folder / "config.json").read_text())
        self.vision_config = VisionConfig.from_hf_config(_Attributes(config))
        self.vision = ReferenceVision(folder, config, device=device)
        self.lm = ReferenceLM(folder, device=device)
        self.text_error = float("nan")

    def judge(self, name: str, ask: Ask, found: Captured) -> None:
        images = [image_to_patches(image, self.vision_config) for image in ask.pictures]
        prompt = self.vision.prompt(ask.ids, images)
        count = len(prompt.ids)
        if images:
            self.report.run(f"{name}: embeddings", lambda: self._embeddings(prompt, found))
        right = self.lm(prompt)
        hidden = torch.cat(found.hidden)[:count]
        if not images:
            self.text_error = float(row_error(hidden, right.last.cpu()).median())
            detail = f"median row distance {self.text_error:.4f}"
            self.report.add(f"{name}: hidden state near float32", self.text_error < 0.2, detail)
            return
        others = {
            "causal": self.lm(prompt, visibility=False),
            "text routing": self.lm(prompt, image_routing=False),
        }
        self.report.run(
            f"{name}: hidden state", lambda: self._hidden(prompt, hidden, right, others)
        )
        self.report.run(f"{name}: experts", lambda: self._experts(prompt, found, right, others))

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
        self, prompt: Prompt, hidden: torch.Tensor, right: Result, others: dict[str, Result]
    ) -> tuple[bool, str]:
        rows = prompt.image_rows
        mine = row_error(hidden, right.last.cpu())
        image, text = float(mine[rows].median()), float(mine[~rows].median())
        wrong = {
            name: float(row_error(hidden, other.last.cpu())[rows].median())
            for name, other in others.items()
        }
        detail = (
            f"median distance of image rows {image:.4f}, text rows {text:.4f}, a text prompt's "
            f"{self.text_error:.4f}; image rows against a reference with "
            + ", ".join(f"{name} {value:.4f}" for name, value in wrong.items())
        )
        near = image < ROW_FACTOR * self.text_error and text < ROW_FACTOR * self.text_error
        return near and all(value > 1.5 * image for value in wrong.values()), detail

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


class _Attributes:
    """A config.json read by attribute, as VisionConfig expects."""

    def __init__(self, values: dict) -> None:
        self.__dict__.update(values)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
