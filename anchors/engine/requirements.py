"""What the overlay relies on at run time, checked in a tree without importing anything.

Each overlay module states it beside the code that uses it, as a literal:

    REQUIRES = (
        "vllm.v1.core.sched.scheduler:Scheduler._try_schedule_encoder_inputs(request, start)",
        "vllm.y:new_name | vllm.x:old_name",
        "vllm.z:Class.name since 0.24",
        "vllm.z:Class.{one, other(argument)}",
    )

`module:name` demands that the module binds the name, `module:Class.name` that the class does (in
its body, as `self.name` in a method, or in a base class that can be followed), and names in
parentheses are parameters that the function must accept. Several names of one place stand in
braces, each an entry of its own. Alternatives, which are one thing in
several places, are parted by ` | `, the newest first. An entry that holds only from a release on,
or up to one, ends in `since` or `until` it; `boundaries.py` says which fact of a tree decides.
A base class can be followed into modules that some entry names.
"""

from __future__ import annotations

import ast
import functools
import os
import re
from dataclasses import dataclass

from anchors.digests import package_files
from anchors.engine.boundaries import BOUNDARIES
from anchors.engine.modules import Modules, Name, Read, bound

_FORM = re.compile(r"vllm((?:\.\w+)*):(\w+)(?:\.(\w+))?(?:\(([\w, *]*)\))?")
_COMMA = re.compile(r", *(?![^(]*\))")  # not one between parameters
_CONDITION = re.compile(r"(.+?) (since|until) (\S+)")


class BadRequirement(ValueError):
    """A REQUIRES entry that does not have the form above."""


@dataclass(frozen=True)
class Requirement:
    """One REQUIRES entry: its text, the overlay module that states it, and its alternatives.

    With a `word` it holds only for trees that have passed as many boundaries as its `place`
    (`since`), or only for those that have not (`until`).
    """

    text: str
    used_by: str
    names: tuple[Name, ...]
    word: str = ""
    place: int = 0

    def holds(self, passed: int) -> bool:
        """Whether a tree that has passed this many boundaries is asked for it."""
        return not self.word or (passed >= self.place) == (self.word == "since")


@dataclass(frozen=True)
class Missing:
    """A requirement that a tree does not meet; `found` says what is there instead."""

    requirement: Requirement
    found: str


def parse(text: str, used_by: str) -> Requirement:
    """Read one entry. Raises BadRequirement."""
    match = _CONDITION.fullmatch(text)
    names, word, release = match.groups() if match else (text, "", "")
    found = tuple(_name(part, text, used_by) for part in names.split(" | "))
    return Requirement(text, used_by, found, word, _place(word, release, text, used_by))


def _name(part: str, text: str, used_by: str) -> Name:
    match = _FORM.fullmatch(part.strip())
    if not match:
        raise BadRequirement(f"{used_by}: REQUIRES entry {text!r} is not module:name(...)")
    module, first, second, parameters = match.groups()
    return Name(
        module=module.lstrip(".").replace(".", "/"),
        owner=first if second else None,
        name=second or first,
        parameters=None
        if parameters is None
        else tuple(p.strip() for p in parameters.split(",") if p.strip()),
    )


def _place(word: str, release: str, text: str, used_by: str) -> int:
    if not word:
        return 0
    known = [edge.first if word == "since" else edge.last for edge in BOUNDARIES]
    if release not in known:
        raise BadRequirement(
            f"{used_by}: REQUIRES entry {text!r}: no fact in anchors/engine/boundaries.py decides "
            f"{release} (known: {word} {', '.join(known)})"
        )
    return known.index(release) + 1


def collect(overlay: str) -> tuple[Requirement, ...]:
    """All entries of the package folder `overlay`, by module. Raises BadRequirement."""
    found: list[Requirement] = []
    for file in package_files(overlay):
        if not file.endswith(".py"):
            continue
        with open(os.path.join(overlay, file), encoding="utf-8") as source:
            tree = ast.parse(source.read(), file)
        node = bound(tree.body, "REQUIRES")
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            found += [parse(one, file) for text in _literal(node, file) for one in _each(text)]
    return tuple(found)


def _each(text: str) -> list[str]:
    """The entries that one with names in braces stands for; else itself."""
    before, brace, rest = text.partition("{")
    inside, _, after = rest.partition("}")
    return [f"{before}{name}{after}" for name in _COMMA.split(inside)] if brace else [text]


def _literal(node: ast.Assign | ast.AnnAssign, file: str) -> tuple[str, ...]:
    try:
        value = ast.literal_eval(node.value) if node.value else ()
    except ValueError as error:
        raise BadRequirement(f"{file}: REQUIRES must be a literal tuple of strings") from error
    if not isinstance(value, tuple) or not all(isinstance(text, str) for text in value):
        raise BadRequirement(f"{file}: REQUIRES must be a literal tuple of strings")
    return value


def files(requirements: tuple[Requirement, ...]) -> frozenset[str]:
    """Every file, relative to the package, that checking may read."""
    read = requirements + (facts() if _conditional(requirements) else ())
    return frozenset(path for entry in read for name in entry.names for path in name.files)


@functools.cache
def facts() -> tuple[Requirement, ...]:
    """The facts that decide the boundaries, in their order, as entries that a tree meets or not."""
    return tuple(parse(edge.fact, "boundaries.py") for edge in BOUNDARIES)


def holding(requirements: tuple[Requirement, ...], read: Read) -> tuple[Requirement, ...]:
    """The requirements that are asked of a tree. `read(path)` gives a file's bytes or None."""
    return _holding(requirements, Modules(read))


def missing(requirements: tuple[Requirement, ...], read: Read) -> tuple[Missing, ...]:
    """The requirements that a tree does not meet. `read(path)` gives a file's bytes or None."""
    modules = Modules(read)
    found: list[Missing] = []
    for requirement in _holding(requirements, modules):
        reasons = [modules.lack(name) for name in requirement.names]
        if all(reasons):
            found.append(Missing(requirement, "; ".join(reason for reason in reasons if reason)))
    return tuple(found)


def _holding(requirements: tuple[Requirement, ...], modules: Modules) -> tuple[Requirement, ...]:
    if not _conditional(requirements):
        return requirements
    met = [not all(modules.lack(name) for name in fact.names) for fact in facts()]
    passed = max((place for place, there in enumerate(met, 1) if there), default=0)
    return tuple(entry for entry in requirements if entry.holds(passed))


def _conditional(requirements: tuple[Requirement, ...]) -> bool:
    return any(entry.word for entry in requirements)
