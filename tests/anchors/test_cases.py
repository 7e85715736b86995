"""The cases that each anchor carries in its own file, and an inventory that shows a removed one.

`python3 -m anchors.drift.update` writes the inventory anew; read the diff before committing.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import libcst as cst
import pytest

from anchors.drift.inventory import inventory
from anchors.engine import fences
from anchors.engine.cases import run
from anchors.kit import anchor
from anchors.sites import all_anchors

INVENTORY = Path(__file__).parent / "inventory.json"
OUTCOMES = ("applies", "drifted: absent", "drifted: twice", "mixed", "not-applicable")

ALL = [(site, case) for site in all_anchors() for case in site.cases]
NUMBERED = [
    f"{site.id}-{case.outcome.replace(': ', '-')}-{site.cases.index(case)}" for site, case in ALL
]


@pytest.mark.parametrize(("site", "case"), ALL, ids=NUMBERED)
def test_case(site, case) -> None:
    compile(case.source, site.file, "exec")
    outcome, patched = run(site, case.source)
    assert outcome == case.outcome
    if outcome != "applies":
        assert patched == case.source
        return
    compile(patched, site.file, "exec")
    assert patched.count(f"# >>> vision-exp:{site.id}\n") == 1
    parted = fences.split(patched.encode())
    assert (parted.stock.decode(), parted.broken) == (case.source, "")
    assert [(block.id, block.intact) for block in parted.blocks] == [(site.id, True)]
    after = patched.partition(f"# <<< vision-exp:{site.id}")[2].strip("\n").split("\n")[0]
    assert after.strip() == case.before
    assert run(site, patched) == (outcome, patched), "a second pass changes something"


@pytest.mark.parametrize("site", all_anchors(), ids=lambda site: site.id)
def test_anchor_says_what_a_reader_needs(site) -> None:
    for field in ("where", "what", "why", "until", "upstream"):
        assert getattr(site, field).strip(), field
    outcomes = Counter(case.outcome for case in site.cases)
    wanted = OUTCOMES[:4] if site.render else ("drifted: absent", "not-applicable")
    assert all(outcomes[name] for name in wanted), outcomes
    assert set(outcomes) <= set(OUTCOMES)


SOURCE = """
import a; from b import wanted as other, mine as own; from c import *
from e import plain, more
class Wanted: pass
class WantedToo: pass
if True:
    class Wanted: pass
    from d import wanted
def wanted(): pass
def wanted_too(): pass
"""


def test_look_ups_count_what_a_module_itself_binds() -> None:
    module = cst.parse_module(SOURCE)
    assert len(anchor.classes(module, "Wanted")) == 1
    assert len(anchor.functions(module, "wanted")) == 1
    names = ("other", "own", "plain", "wanted", "mine", "a")
    assert [anchor.imported(module, name) for name in names] == [1, 1, 1, 0, 0, 0]


def test_inventory() -> None:
    """A site, case or injected text that changes or goes away shows in the diff of that file."""
    assert json.loads(INVENTORY.read_text()) == inventory()
