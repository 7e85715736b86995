"""The GPU checks' layout and patches against the native ones, and what they conclude of rows."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import released_config
import torch
from gpu.jobs import checks_reference
from gpu.lib.capture import Captured
from gpu.lib.rig import SQUARE, WIDE, random_image
from gpu.reference import image as reference_image
from gpu.reference.image import KINDS, SENTINEL_FIRST
from gpu.reference.lm import Result
from PIL import Image

from vision_exp import layout
from vision_exp.config import VisionConfig
from vision_exp.image.transform import image_to_patches

GOLDENS = json.loads(
    (Path(__file__).parents[1] / "goldens" / "image_layout.json").read_text(encoding="utf-8")
)["images"]
CONFIG = released_config.VISION


def sha256(values: np.ndarray) -> str:
    return hashlib.sha256(values.tobytes()).hexdigest()


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda g: f"{g['width']}x{g['height']}")
def test_blocks_are_the_native_ones(golden: dict) -> None:
    for block in golden["blocks"]:
        kinds, shown = reference_image.block_of(tuple(golden["llm_grid"]), block["start_pos_mod4"])
        assert len(kinds) == block["length"]
        assert sha256(np.array(kinds, dtype=np.int8)) == block["types_sha256"]
        assert sha256(np.array(shown, dtype=np.int32)) == golden["perm_sha256"]


def test_patches_are_the_native_ones() -> None:
    golden = next(each for each in GOLDENS if (each["width"], each["height"]) == (756, 756))
    x, y = np.arange(756)[None, :], np.arange(756)[:, None]
    base = 7 * x + 13 * y + 5 * (x * y % 17)
    image = Image.fromarray(np.stack([(base + 29 * c).astype(np.uint8) for c in range(3)], -1))
    found = reference_image.patches_of(image, CONFIG)
    assert sha256(found.patches.view(torch.int16).numpy()) == golden["patches_sha256"]
    assert [list(found.vit_grid), list(found.llm_grid)] == [golden["vit_grid"], golden["llm_grid"]]


@pytest.mark.parametrize("size", [SQUARE, WIDE])
def test_the_checks_pictures_are_taken_as_they_are(size: tuple[int, int]) -> None:
    class Attributes:
        def __init__(self) -> None:
            self.__dict__.update(released_config.LANGUAGE | CONFIG)

    image = random_image(*size, seed=1)
    mine = reference_image.patches_of(image, CONFIG)
    theirs = image_to_patches(image, VisionConfig.from_hf_config(Attributes()))
    assert torch.equal(mine.patches.view(torch.int16), theirs.patches.view(torch.int16))
    assert (mine.vit_grid, mine.llm_grid) == (theirs.vit_grid, theirs.llm_grid)


@pytest.mark.parametrize("size", [(391, 392), (378, 378), (3136, 392), (770, 770)])
def test_pictures_that_would_be_resized_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="resized|not whole"):
        reference_image.patches_of(Image.new("RGB", size), CONFIG)


def test_ids_are_the_overlay_s() -> None:
    assert (reference_image.PLACEHOLDER_ID, SENTINEL_FIRST) == (
        layout.PLACEHOLDER_ID,
        layout.SENTINEL_FIRST,
    )
    assert tuple(kind.name for kind in layout.TokenType) == KINDS


#: Ten text rows, then three PAD, START, IMAGE and NEWLINE rows, END.
IDS = torch.tensor([7] * 10 + [SENTINEL_FIRST + kind for kind in (1, 1, 1, 0, 2, 2, 2, 3, 3, 4)])
TEXT = torch.full((100,), 0.1)


def assessed(change: dict[str, float], wrong: dict[str, float] | None = None) -> tuple[bool, str]:
    """All rows at 0.1 and 0.5 from a wrong reference, but for the kinds named in the arguments."""

    def rows(value: float, moved: dict[str, float]) -> torch.Tensor:
        found = torch.full((len(IDS),), value)
        for name, other in moved.items():
            kind = SENTINEL_FIRST + KINDS.index(name) if name in KINDS else 7
            found[kind == IDS] = other
        return found

    others = {"causal": rows(0.5, wrong or {}), "text routing": rows(0.5, {})}
    return checks_reference.assess_hidden(IDS, rows(0.1, change), others, TEXT)


def test_rows_of_every_kind_must_be_near() -> None:
    assert assessed({})[0]
    for name in (*KINDS, "text"):
        assert assessed({name: 0.14})[0]
        good, words = assessed({name: 0.16})
        assert not good, name
        assert name == "text" or f"nearest to its limit: {name}, 107%" in words


def test_a_row_that_one_run_moves_counts_as_the_others_have_it() -> None:
    exact = torch.ones(3, 4)
    runs = [Captured(hidden=[exact * 1.1]) for _ in range(3)]
    runs[1].hidden = [exact[:1] * 1.1, exact[1:] * 1.5]
    reference = Result(exact, exact)
    found = checks_reference.middle_errors(runs, reference)
    assert torch.allclose(found, torch.full((3,), 0.1))
    runs[2].hidden = runs[1].hidden
    found = checks_reference.middle_errors(runs, reference)
    assert torch.allclose(found, torch.tensor([0.1, 0.5, 0.5]))


def test_few_rows_may_be_as_far_as_a_row_of_text() -> None:
    text = torch.cat([TEXT, torch.full((10,), 0.3)])
    mine = torch.full((len(IDS),), 0.1)
    wrong = {"causal": mine + 1}
    for name in KINDS:
        moved = mine.clone()
        moved[SENTINEL_FIRST + KINDS.index(name) == IDS] = 0.25
        good = checks_reference.assess_hidden(IDS, moved, wrong, text)[0]
        assert good is (name in checks_reference.FEW), name


def test_rows_must_be_further_from_a_reference_without_a_rule() -> None:
    assert not assessed({}, {"IMAGE": 0.14})[0]
    assert assessed({}, {"IMAGE": 0.16})[0]
    for name in ("START", "NEWLINE", "END"):
        assert not assessed({}, {name: 0.1})[0], name
    assert assessed({}, {"PAD": 0.1})[0], "pads before START see no image"


def test_a_prompt_without_a_kind_proves_nothing() -> None:
    ids = IDS.clone()
    ids[IDS == SENTINEL_FIRST + 4] = 7
    mine = torch.full((len(ids),), 0.1)
    assert not checks_reference.assess_hidden(ids, mine, {"causal": mine + 1}, TEXT)[0]
