"""What a site says about itself, and the small LibCST look-ups that sites share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import libcst as cst

APPLIES = "applies"
ABSENT = "drifted: absent"
TWICE = "drifted: twice"
MIXED = "mixed"
NOT_APPLICABLE = "not-applicable"


class Drift(Exception):
    """A fact an anchor needs is not there exactly as often as expected."""

    def __init__(self, fact: str, found: int, expected: int = 1) -> None:
        super().__init__(f"expected exactly {expected} of: {fact}; found {found}")
        self.fact = fact
        self.found = found
        self.expected = expected

    @property
    def kind(self) -> str:
        """`drifted: absent` or `drifted: twice`."""
        return ABSENT if self.found < self.expected else TWICE


class NotApplicable(Exception):
    """The anchor has nothing to do in this file; the text says why."""


@dataclass(frozen=True)
class Match:
    """Where an edit goes: before 0-based `line` (None: end of file), and names it needs."""

    line: int | None = None
    indent: str = ""
    names: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Values:
    """What rendering needs besides the match."""

    root: str
    overlay: str
    plan: str


@dataclass(frozen=True)
class Case:
    """A piece of source and what must come of it; `before` is the line an edit goes in front of."""

    outcome: str
    source: str
    before: str = ""


@dataclass(frozen=True)
class Anchor:
    """One edit site.

    `find` takes the parsed module and gives a Match, or raises Drift or NotApplicable.
    `render` gives the body to fence; an anchor without one only judges the file.
    `optional`: a release may lack the file; the anchor is not applicable where the package of the
    file does not import it. `order` is the place in reports, those of one place by id.
    """

    id: str
    file: str
    where: str
    what: str
    why: str
    until: str
    upstream: str
    find: Callable[[cst.Module], Match]
    render: Callable[[Match, Values], str] | None
    cases: tuple[Case, ...]
    optional: bool = False
    order: int = 100


def top_level(module: cst.Module) -> Iterator[cst.CSTNode]:
    """Statements of the module itself, simple statement lines opened up."""
    import libcst as cst

    for statement in module.body:
        if isinstance(statement, cst.SimpleStatementLine):
            yield from statement.body
        else:
            yield statement


_IS_NODE = "__dataclass_fields__"  # LibCST's nodes are abstract classes: isinstance is slow


@lru_cache(maxsize=256)  # LibCST has fewer kinds of nodes
def _parts(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    """The fields of a kind of node that hold code; those left out are white space everywhere."""
    names = (field.name for field in fields(kind))
    return tuple(name for name in names if not name.startswith(("whitespace", "leading_lines")))


def children(node: cst.CSTNode) -> list[cst.CSTNode]:
    """The nodes right below `node`, less most white space.

    LibCST's own `children` calls a visitor for every node, and takes five times as long.
    """
    found: list[cst.CSTNode] = []
    for name in _parts(node.__class__):
        value = getattr(node, name)
        if value.__class__ in (list, tuple):
            found += [item for item in value if hasattr(item, _IS_NODE)]
        elif hasattr(value, _IS_NODE):  # not text, a flag or MaybeSentinel
            found.append(value)
    return found


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """`node` and all code below it. LibCST's matchers cost as much to import as LibCST."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += reversed(children(node))


def classes(module: cst.Module, name: str) -> list[cst.ClassDef]:
    """Top-level classes called `name`."""
    import libcst as cst

    return [
        node
        for node in top_level(module)
        if isinstance(node, cst.ClassDef) and node.name.value == name
    ]


def functions(module: cst.Module, name: str) -> list[cst.FunctionDef]:
    """Top-level functions called `name`."""
    import libcst as cst

    return [
        node
        for node in top_level(module)
        if isinstance(node, cst.FunctionDef) and node.name.value == name
    ]


def imported(module: cst.Module, name: str) -> int:
    """How many top-level `from x import` statements bind `name`."""
    import libcst as cst

    count = 0
    for node in top_level(module):
        if isinstance(node, cst.ImportFrom) and not isinstance(node.names, cst.ImportStar):
            for alias in node.names:
                bound = alias.asname.name if alias.asname else alias.name
                count += isinstance(bound, cst.Name) and bound.value == name
    return count


def exactly_one(fact: str, found: int) -> None:
    """Raises Drift unless `found` is 1."""
    if found != 1:
        raise Drift(fact, found)
