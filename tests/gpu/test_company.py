"""How the server check tells images that part too often from a server that varies by itself."""

from __future__ import annotations

import pytest
from gpu import checks_server


def test_images_are_held_against_texts_in_the_same_company() -> None:
    assert checks_server.no_more_by_chance(24, 24, 24) == pytest.approx(1.0)
    assert checks_server.no_more_by_chance(14, 19, 24) == pytest.approx(0.108, abs=0.002)
    assert checks_server.no_more_by_chance(8, 24, 24) < 1e-6
    assert checks_server.no_more_by_chance(12, 21, 24) < checks_server.LEAST_CHANCE
