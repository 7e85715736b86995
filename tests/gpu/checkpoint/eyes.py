"""Prompts with pictures for the float32 reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from gpu.lib import sights
from gpu.lib.sights import Asked, Sight
from gpu.reference.image import patches_of
from gpu.reference.vision import ReferenceVision


class Eyes:
    """Prompts from pictures; the tower runs once for each picture and each way up."""

    def __init__(
        self,
        vision: ReferenceVision,
        pictures: Sequence[Sight],
        *,
        upside_down: bool = False,
        permuted: bool = True,
        swapped: bool = False,
    ) -> None:
        self.vision, self.pictures = vision, pictures
        self.flipped, self.rules = upside_down, {"permuted": permuted, "swapped": swapped}
        self.kept: dict[int, tuple[torch.Tensor, tuple[int, int]]] = {}

    def features(self, number: int) -> tuple[torch.Tensor, tuple[int, int]]:
        """What the aligner's last matrix is given, and the grid of cells."""
        if number not in self.kept:
            image = self.pictures[number].image
            patches = patches_of(image.rotate(180) if self.flipped else image, self.vision.config)
            rows = self.vision.features(patches.patches, patches.vit_grid)
            self.kept[number] = (rows, patches.llm_grid)
        return self.kept[number]

    def batches(self, asked: Sequence[Asked], size: int) -> Iterator[tuple[list[Asked], list]]:
        """Questions of one wording and one size of picture together, with their answers' tokens."""
        groups: dict[tuple, list[Asked]] = {}
        for each in asked:
            image = self.pictures[each.sights[0]].image
            groups.setdefault((each.question.name, image.size), []).append(each)
        for group in groups.values():
            for start in range(0, len(group), size):
                part = group[start : start + size]
                yield part, [self.prompt(each) for each in part]

    def prompt(self, asked: Asked) -> object:
        ids = [*sights.token_ids(asked), sights.token(asked.answer)]
        images = []
        for number in asked.sights:
            rows, grid = self.features(number)
            images.append((self.vision.aligned(rows), grid))
        return self.vision.expanded(ids, images, **self.rules)
