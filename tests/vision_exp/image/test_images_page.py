"""docs/images.md says what every kind of image becomes, and that is what it becomes."""

from __future__ import annotations

from pathlib import Path

import image_kinds
import pytest
from PIL import features

PAGE = Path(__file__).resolve().parents[3] / "docs" / "images.md"
ROWS = {
    line.split("|")[1].strip(): line
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| given ")
}


def test_the_page_has_every_kind_in_order() -> None:
    assert list(ROWS) == list(image_kinds.KINDS)


@pytest.mark.parametrize("kind", image_kinds.KINDS)
def test_row(kind: str) -> None:
    if kind == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    assert ROWS[kind] == image_kinds.row(kind)
