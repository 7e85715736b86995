"""What the GPU checks conclude from answers and launches, without a GPU."""

from __future__ import annotations

import pytest
from gpu import checks_server, compare_text


def test_images_are_held_against_texts_in_the_same_company() -> None:
    assert checks_server.no_more_by_chance(24, 24, 24) == pytest.approx(1.0)
    assert checks_server.no_more_by_chance(14, 19, 24) == pytest.approx(0.108, abs=0.002)
    assert checks_server.no_more_by_chance(8, 24, 24) < 1e-6
    assert checks_server.no_more_by_chance(12, 21, 24) < checks_server.LEAST_CHANCE


def test_streams_that_start_together_may_change_places() -> None:
    stock = [["a", "b"], ["c", "c"], ["d"]]
    assert compare_text.kernel_lists(stock, [["a", "b"], ["d"], ["c", "c"]])[0]
    assert not compare_text.kernel_lists(stock, [["b", "a"], ["c", "c"], ["d"]])[0]
    assert not compare_text.kernel_lists(stock, [["a", "b"], ["c"], ["c", "d"]])[0]
    assert compare_text.changes(stock, [["d"], ["a", "x", "b"], ["c", "c"]]) == (["x"], [])
    assert compare_text.changes(stock, [["a", "b"], ["c", "c"]]) == ([], ["d"])
