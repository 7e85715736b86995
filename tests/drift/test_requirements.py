"""What the overlay needs at run time is checked in a tree by reading it."""

from __future__ import annotations

from pathlib import Path

import pytest

from anchors.engine import requirements
from anchors.engine.boundaries import BOUNDARIES
from anchors.engine.requirements import BadRequirement, Requirement, parse

TREE = {
    "v1/sched.py": b"""
from vllm.v1.base import Base
try:
    import fast
except ImportError:
    fast = None

class Mixin:
    def shared(self, a): ...

class Scheduler(Mixin, Base):
    limit: int = 3
    def __init__(self):
        self.waiting = []
    def schedule(self, budget, *, strict=False, **kwargs): ...

def helper(x, *rest): ...
""",
    "v1/base.py": b"class Base:\n    def inherited(self, token): ...\n",
    "v1/package/__init__.py": b"VALUE = 1\n",
    "v1/broken.py": b"def (:\n",
}


def lacks(text: str, tree: dict[str, bytes] = TREE) -> str:
    found = requirements.missing((parse(text, "here.py"),), tree.get)
    return found[0].found if found else ""


@pytest.mark.parametrize(
    "text",
    [
        "vllm.v1.sched:Scheduler",
        "vllm.v1.sched:helper(x, *)",
        "vllm.v1.sched:fast",
        "vllm.v1.sched:Base",
        "vllm.v1.sched:Scheduler.limit",
        "vllm.v1.sched:Scheduler.waiting",
        "vllm.v1.sched:Scheduler.schedule(self, budget, strict, **)",
        "vllm.v1.sched:Scheduler.shared(a)",
        "vllm.v1.sched:Scheduler.inherited(token)",
        "vllm.v1.package:VALUE",
        "vllm.v1.sched:gone | vllm.v1.sched:helper",
        "vllm.v1.absent:anything since 0.24",
        "vllm.v1.sched:helper(x, *) until 0.23",
    ],
)
def test_met(text: str) -> None:
    assert lacks(text) == ""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("vllm.v1.absent:anything", "vllm.v1.absent is missing"),
        ("vllm.v1.broken:anything", "does not parse"),
        ("vllm.v1.sched:helpers", "does not bind helpers (nearest: helper)"),
        ("vllm.v1.sched:Sheduler.x", "has no Sheduler (nearest: Scheduler)"),
        ("vllm.v1.sched:Scheduler.schedul", "no schedul (nearest: schedule)"),
        ("vllm.v1.sched:Scheduler.schedule(now)", "does not take now: it takes self, budget"),
        ("vllm.v1.sched:Scheduler.shared(**)", "does not take **"),
        ("vllm.v1.sched:helper.x", "is no class"),
        ("vllm.v1.sched:gone", "does not bind gone"),
        ("vllm.v1.sched:gone until 0.23", "does not bind gone"),
        ("vllm.v1.sched:gone | vllm.v1.absent:x", "gone; vllm.v1.absent is missing"),
    ],
)
def test_missing(text: str, reason: str) -> None:
    assert reason in lacks(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "torch.nn:Module",
        "vllm.a",
        "vllm.a:b.c.d",
        "vllm.a:b(",
        "?vllm.a:b",
        "vllm.a:b from 0.24",
        "vllm.a:b since 0.25",
        "vllm.a:b until 0.24",
        "vllm.a:b since 0.24 | vllm.c:b",
    ],
)
def test_a_misspelt_entry_is_an_error(text: str) -> None:
    with pytest.raises(BadRequirement, match=r"here\.py"):
        parse(text, "here.py")


def test_collect_reads_literals_without_importing(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("import nowhere\nREQUIRES = ('vllm.a:b',)\n")
    (tmp_path / "two.py").write_text("X = 1\n")
    assert requirements.collect(str(tmp_path)) == (
        Requirement("vllm.a:b", "one.py", parse("vllm.a:b", "one.py").names),
    )
    (tmp_path / "two.py").write_text("REQUIRES = [x for x in y]\n")
    with pytest.raises(BadRequirement, match=r"two\.py: REQUIRES must be a literal"):
        requirements.collect(str(tmp_path))


def test_names_in_braces_are_entries_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        "REQUIRES = ('vllm.a:C.{b, d(x, y), e} since 0.24', 'vllm.a:{f, g}')\n"
    )
    assert [entry.text for entry in requirements.collect(str(tmp_path))] == [
        "vllm.a:C.b since 0.24",
        "vllm.a:C.d(x, y) since 0.24",
        "vllm.a:C.e since 0.24",
        "vllm.a:f",
        "vllm.a:g",
    ]


def test_files_names_module_and_package() -> None:
    entry = parse("vllm.a.b:c | vllm.d:e", "here.py")
    named = {"a/b.py", "a/b/__init__.py", "d.py", "d/__init__.py"}
    assert requirements.files((entry,)) == named
    conditional = parse("vllm.a.b:c | vllm.d:e since 0.24", "here.py")
    facts = requirements.files(requirements.facts())
    assert requirements.files((conditional,)) == named | facts


def tree_with(*facts: str) -> dict[str, bytes]:
    """A tree that has these facts: REQUIRES entries that name a class's member."""
    tree = {}
    for fact in facts:
        (name,) = parse(fact.split(" | ")[0], "here.py").names
        source = f"class {name.owner}:\n    def __init__(self): self.{name.name} = 1\n"
        tree[name.files[0]] = source.encode()
    return tree


@pytest.mark.parametrize("number", range(len(BOUNDARIES)))
def test_the_fact_of_a_boundary_decides_what_is_asked(number: int) -> None:
    edge = BOUNDARIES[number]
    since, until = f"vllm.a:b since {edge.first}", f"vllm.a:b until {edge.last}"
    before = tree_with(*(other.fact for other in BOUNDARIES[:number]))
    assert (lacks(since, before), bool(lacks(until, before))) == ("", True)
    after = before | tree_with(edge.fact)
    assert (bool(lacks(since, after)), lacks(until, after)) == (True, "")


def test_a_later_fact_tells_that_earlier_boundaries_are_passed() -> None:
    newest = tree_with(BOUNDARIES[-1].fact)
    assert all(lacks(f"vllm.a:b since {edge.first}", newest) for edge in BOUNDARIES)


def test_what_is_asked_of_a_tree_is_what_holds_there() -> None:
    entries = tuple(parse(text, "here.py") for text in ("vllm.a:b", "vllm.a:c since 0.24"))
    assert requirements.holding(entries, {}.get) == entries[:1]
    assert requirements.holding(entries, tree_with(BOUNDARIES[0].fact).get) == entries
