"""What the verdicts of a tree's anchors make of the tree: every combination, by plain rules."""

from __future__ import annotations

from itertools import product

from anchors.drift.verdict import (
    APPLIES,
    DRIFTED,
    NOT_APPLICABLE,
    SUPERSEDED,
    Assessment,
    Finding,
)

KINDS = (APPLIES, DRIFTED, NOT_APPLICABLE, SUPERSEDED)


def test_every_combination_of_anchors_gives_the_trees_verdict() -> None:
    for verdicts in (combination for n in range(4) for combination in product(KINDS, repeat=n)):
        findings = tuple(Finding(f"anchor-{i}", "a.py", one) for i, one in enumerate(verdicts))
        if DRIFTED in verdicts:
            expected = DRIFTED
        elif verdicts and set(verdicts) <= {verdicts[0]}:
            expected = verdicts[0]
        else:
            expected = APPLIES
        assert Assessment("tree", findings).verdict == expected, verdicts
        assert Assessment("tree", findings, error="cannot be read").verdict == "error", verdicts
