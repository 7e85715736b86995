"""The cases that each anchor carries in its own file, and an inventory that shows a removed one.

`python3 -m anchors.drift.update` writes the inventory anew; read the diff before committing.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from anchors.drift.inventory import inventory
from anchors.engine import fences
from anchors.engine.cases import run
from anchors.sites import all_anchors

INVENTORY = Path(__file__).parent / "inventory.json"
OUTCOMES = ("applies", "drifted: absent", "drifted: twice", "mixed", "not-applicable")

ALL = [(anchor, case) for anchor in all_anchors() for case in anchor.cases]
NUMBERED = [
    f"{anchor.id}-{case.outcome.replace(': ', '-')}-{anchor.cases.index(case)}"
    for anchor, case in ALL
]


@pytest.mark.parametrize(("anchor", "case"), ALL, ids=NUMBERED)
def test_case(anchor, case) -> None:
    compile(case.source, anchor.file, "exec")
    outcome, patched = run(anchor, case.source)
    assert outcome == case.outcome
    if outcome != "applies":
        assert patched == case.source
        return
    compile(patched, anchor.file, "exec")
    assert patched.count(f"# >>> vision-exp:{anchor.id}\n") == 1
    parted = fences.split(patched.encode())
    assert (parted.stock.decode(), parted.broken) == (case.source, "")
    assert [(block.id, block.intact) for block in parted.blocks] == [(anchor.id, True)]
    after = patched.partition(f"# <<< vision-exp:{anchor.id}")[2].strip("\n").split("\n")[0]
    assert after.strip() == case.before
    assert run(anchor, patched) == (outcome, patched), "a second pass changes something"


@pytest.mark.parametrize("anchor", all_anchors(), ids=lambda anchor: anchor.id)
def test_anchor_says_what_a_reader_needs(anchor) -> None:
    for field in ("where", "what", "why", "until", "upstream"):
        assert getattr(anchor, field).strip(), field
    outcomes = Counter(case.outcome for case in anchor.cases)
    wanted = OUTCOMES[:4] if anchor.render else ("drifted: absent", "not-applicable")
    assert all(outcomes[name] for name in wanted), outcomes
    assert set(outcomes) <= set(OUTCOMES)


def test_inventory() -> None:
    """A site, case or injected text that changes or goes away shows in the diff of that file."""
    assert json.loads(INVENTORY.read_text()) == inventory()
