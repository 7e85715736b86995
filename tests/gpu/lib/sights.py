"""Pictures with one shape and the questions about them, for a checkpoint that sees.

A picture is a function of its number and the seed. The background is noise on a gradient, so that
no cell of it is flat; the shape has one of eight colours, four kinds, and lies in one cell of nine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

PLACEHOLDER_ID = 129264
#: Ids of the tokenizer's bytes begin here.
FIRST_BYTE = 3
BEGIN_TOKEN, END_TOKEN = 0, 1
#: Of the test tokenizer: the turns, ``</think>`` and two newlines.
USER_TOKEN, ASSISTANT_TOKEN, ANSWER_TOKEN, NEWLINES_TOKEN = 128803, 128804, 128799, 259
COLOURS = {
    "r": (230, 25, 25),
    "g": (25, 200, 25),
    "b": (30, 50, 235),
    "y": (235, 220, 25),
    "c": (25, 215, 220),
    "m": (220, 30, 215),
    "k": (8, 8, 8),
    "w": (250, 250, 250),
}
KINDS = ("square", "disc", "triangle", "cross")
#: (width, height): square, both orientations and a flat one; whole patches, taken as they are.
SIZES = ((392, 392), (448, 336), (336, 448), (504, 308))


@dataclass(frozen=True)
class Sight:
    """One picture: ``colour`` is a letter, ``cell`` 0 to 8 row by row, ``mask`` bool (h, w)."""

    image: Image.Image
    mask: np.ndarray
    colour: str
    kind: int
    cell: int


@dataclass(frozen=True)
class Question:
    """``answers``: one byte each, and no byte is an answer to two questions."""

    name: str
    wording: str
    answers: str
    goal: float


QUESTIONS = (
    Question("colour", "WHICH COLOUR HAS THE SHAPE?", "".join(COLOURS), 0.95),
    Question("cell", "IN WHICH CELL IS IT?", "123456789", 0.85),
    Question("which", "WHICH OF THE TWO IS RED?", "FS", 0.90),
)


@dataclass(frozen=True)
class Asked:
    """One question of the pictures with these numbers, and the right answer, a byte."""

    question: Question
    sights: tuple[int, ...]
    answer: str


def sight(number: int, seed: int, sizes: Sequence[tuple[int, int]] = SIZES) -> Sight:
    """Picture ``number``; sizes take turns, all else is drawn."""
    rng = np.random.default_rng((seed, number))
    width, height = sizes[number % len(sizes)]
    colour = "".join(COLOURS)[rng.integers(len(COLOURS))]
    kind, cell = int(rng.integers(len(KINDS))), int(rng.integers(9))
    radius = min(width, height) / 6 * rng.uniform(0.55, 0.95)
    x = (cell % 3 + 0.5) * width / 3 + rng.uniform(-0.1, 0.1) * width / 3
    y = (cell // 3 + 0.5) * height / 3 + rng.uniform(-0.1, 0.1) * height / 3
    mask = _mask(kind, np.arange(width)[None] - x, np.arange(height)[:, None] - y, radius)
    ends = rng.uniform(70, 190, size=(2, 3))
    along = np.linspace(0, 1, width)[None, :, None]
    pixels = ends[0] * (1 - along) + ends[1] * along + rng.normal(0, 12, size=(height, width, 3))
    pixels[mask] = np.array(COLOURS[colour]) + rng.normal(0, 6, size=(int(mask.sum()), 3))
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    return Sight(image, mask, colour, kind, cell)


def _mask(kind: int, x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    if KINDS[kind] == "square":
        return (abs(x) < radius) & (abs(y) < radius)
    if KINDS[kind] == "disc":
        return x**2 + y**2 < radius**2
    if KINDS[kind] == "triangle":
        return (abs(y) < radius) & (abs(x) < (y + radius) / 2)
    arm = radius / 2.5
    inside = (abs(x) < radius) & (abs(y) < radius)
    return inside & ((abs(x) < arm) | (abs(y) < arm))


def questions(sights: Sequence[Sight], numbers: range, seed: int) -> list[Asked]:
    """Every question of every picture of ``numbers``; pairs stay within them and of one size."""
    rng = np.random.default_rng((seed, numbers.start, len(numbers)))
    groups: dict[tuple[tuple[int, int], bool], list[int]] = {}
    for number in numbers:
        one = sights[number]
        groups.setdefault((one.image.size, one.colour == "r"), []).append(number)
    colour, cell, which = QUESTIONS
    found = []
    for number in numbers:
        one = sights[number]
        found.append(Asked(colour, (number,), one.colour))
        found.append(Asked(cell, (number,), cell.answers[one.cell]))
        partners = groups.get((one.image.size, one.colour != "r"), [])
        if partners:
            other = partners[rng.integers(len(partners))]
            first, red = bool(rng.integers(2)), one.colour == "r"
            pair = (number, other) if first else (other, number)
            found.append(Asked(which, pair, "F" if first == red else "S"))
    return found


def token(answer: str) -> int:
    return FIRST_BYTE + ord(answer)


def token_ids(asked: Asked) -> list[int]:
    """Token ids that a chat request without thinking becomes: its pictures, then the wording.

    Two newlines join the parts of a message. No merge of the test tokenizer has capital letters.
    """
    ids = [BEGIN_TOKEN, USER_TOKEN]
    for _ in asked.sights:
        ids += [PLACEHOLDER_ID, NEWLINES_TOKEN]
    ids += [FIRST_BYTE + byte for byte in asked.question.wording.encode()]
    return [*ids, ASSISTANT_TOKEN, ANSWER_TOKEN]


def coverage(one: Sight, side: int) -> np.ndarray:
    """(cells, 14) float32 of a grid of ``side`` pixels: colours, kinds, presence, presence / area.

    The area is counted in cells, so the last column adds up to 1.
    """
    height, width = one.mask.shape
    padded = np.pad(one.mask, ((0, -height % side), (0, -width % side))).astype(np.float32)
    rows, columns = padded.shape[0] // side, padded.shape[1] // side
    present = padded.reshape(rows, side, columns, side).mean(axis=(1, 3)).ravel()
    targets = np.zeros((present.size, len(COLOURS) + len(KINDS) + 2), dtype=np.float32)
    targets[:, list(COLOURS).index(one.colour)] = present
    targets[:, len(COLOURS) + one.kind] = present
    targets[:, -2] = present
    targets[:, -1] = present / present.sum()
    return targets
