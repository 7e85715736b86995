"""What the overlay needs at run time is checked in a tree by reading it."""

from __future__ import annotations

from pathlib import Path

import pytest

from anchors.engine import requirements
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
        "?vllm.v1.absent:anything",
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
        ("?vllm.v1.sched:gone", "does not bind gone"),
        ("vllm.v1.sched:gone | vllm.v1.absent:x", "gone; vllm.v1.absent is missing"),
    ],
)
def test_missing(text: str, reason: str) -> None:
    assert reason in lacks(text)


@pytest.mark.parametrize("text", ["", "torch.nn:Module", "vllm.a", "vllm.a:b.c.d", "vllm.a:b("])
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


def test_files_names_module_and_package() -> None:
    entry = parse("vllm.a.b:c | ?vllm.d:e", "here.py")
    assert requirements.files((entry,)) == {"a/b.py", "a/b/__init__.py", "d.py", "d/__init__.py"}
