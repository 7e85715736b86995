"""What is said of a draft loader is what happens when the patched loader runs."""

from __future__ import annotations

import loader_runs as runs
import loader_shapes as shapes
import pytest
from hypothesis import HealthCheck, given, settings


@settings(
    max_examples=100, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(shapes.SHAPES)
def test_an_accepted_loader_loads(shape: shapes.Shape) -> None:
    """Of generated loaders; `bench/loaders.py` makes 2,000, and counts needless refusals."""
    match = runs.verdict(shape.source)
    if match is not None and runs.loads_stock(shape.source):
        assert runs.works(runs.patched(shape.source, match)), shape.source


def make(**parts: object) -> shapes.Shape:
    plain: dict[str, object] = {
        "loop": shapes.LOOPS[0],
        "early": (),
        "rename": shapes.RENAMES[0],
        "late": "",
        "load": shapes.LOADS[0],
        "place": "before",
        "helper": shapes.HELPERS[0],
        "loads_first": False,
        "name": "name",
    }
    return shapes.Shape(**{**plain, **parts})  # type: ignore[arg-type]


GOOD = [
    *(make(loop=loop) for loop in shapes.LOOPS),
    *(make(early=(early,)) for early in shapes.EARLY),
    *(make(rename=rename) for rename in shapes.RENAMES),
    *(make(rename="N = self._renamed(N)\n", helper=helper) for helper in shapes.HELPERS),
    *(make(late=late) for late in shapes.LATE),
    *(make(load=load) for load in shapes.LOADS),
    make(place="within"),
]
WRONG = [
    *(make(early=(early,)) for early in shapes.WRONG_EARLY),
    *(make(rename=rename) for rename in shapes.WRONG_RENAMES),
    *(make(late=late) for late in shapes.WRONG_LATE),
    *(make(load=load) for load in shapes.WRONG_LOADS),
    make(place="after"),
    make(loads_first=True),
]


@pytest.mark.parametrize("shape", GOOD, ids=range(len(GOOD)))
def test_each_shape_that_can_be_proven_is_accepted_and_runs(shape: shapes.Shape) -> None:
    match = runs.verdict(shape.source)
    assert match is not None, shape.source
    assert runs.works(runs.patched(shape.source, match)), shape.source


@pytest.mark.parametrize("shape", WRONG, ids=range(len(WRONG)))
def test_each_shape_that_parts_the_two_names_is_refused(shape: shapes.Shape) -> None:
    assert runs.verdict(shape.source) is None, shape.source


def test_most_of_the_wrong_shapes_would_fail() -> None:
    """Else the test above asks for needless refusals only."""
    kept = [s for s in WRONG if runs.loads_stock(s.source)]
    failing = [
        s
        for s in kept
        if not any(runs.works(runs.patched(s.source, m)) for m in runs.candidates(s.source))
    ]
    assert len(failing) >= 15, len(failing)
