"""How an image becomes patches and a block of tokens, in plain Python, apart from the overlay's.

Written from the description of the checkpoint's own format and held against values of the native
functions (tests/goldens). Only for images that are taken as they are: whole patches, and no more
or fewer than the checkpoint wants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

PLACEHOLDER_ID = 129264
#: Ids of a block's tokens: the id of START and what follows it.
SENTINEL_FIRST = 129257
START, PAD, IMAGE, NEWLINE, END = range(5)
KINDS = ("START", "PAD", "IMAGE", "NEWLINE", "END")


@dataclass(frozen=True)
class Patches:
    """``patches``: bfloat16 (h * w, 3, p, p), row by row; grids are (h, w)."""

    patches: torch.Tensor
    vit_grid: tuple[int, int]
    llm_grid: tuple[int, int]


def patches_of(image: Image.Image, config: dict[str, Any]) -> Patches:
    """Patches of an RGB image. ValueError for one that would be resized."""
    side, ratio = config["vision_patch_size"], config["vision_downsample_ratio"]
    width, height = image.size
    if image.mode != "RGB" or width % side or height % side:
        raise ValueError(f"a {width}x{height} image of mode {image.mode} is not whole patches")
    if not config["vision_min_pixels"] <= width * height or width >= 8 * height:
        raise ValueError(f"a {width}x{height} image would be resized")
    rows, columns = height // side, width // side
    cells = (-(-rows // ratio), -(-columns // ratio))
    if len(block_of(cells, 0)[0]) > config["vision_max_n_token"]:
        raise ValueError(f"a {width}x{height} image would be resized to fewer tokens")
    values = (np.asarray(image).astype(np.float32) / 255 - 0.5) / 0.5
    found = []
    for top in range(0, height, side):
        for left in range(0, width, side):
            found.append(values[top : top + side, left : left + side].transpose(2, 0, 1))
    patches = torch.from_numpy(np.stack(found)).to(torch.bfloat16)
    return Patches(patches, (rows, columns), cells)


def block_of(cells: tuple[int, int], start: int) -> tuple[list[int], list[int]]:
    """Kinds of the tokens of an (h, w) grid of cells that begins at position ``start``.

    And which cell, in raster order, each IMAGE token shows. Four tokens after START share a
    compressed key, so START is the last of its four, and two rows are read column by column.
    """
    height, width = cells
    kinds = [PAD] * ((3 - start) % 4) + [START]
    shown: list[int] = []
    content: list[int] = []
    for upper in range(0, height, 2):
        for column in range(width + 1):
            for row in (upper, upper + 1):
                if row == height:
                    content.append(PAD)
                elif column == width:
                    content.append(NEWLINE)
                else:
                    content.append(IMAGE)
                    shown.append(row * width + column)
    content += [PAD] * (-len(content) % 4)
    return [*kinds, *content, END], shown
