"""What the overlay relies on at run time, checked in a tree without importing anything.

Each overlay module states it beside the code that uses it, as a literal:

    REQUIRES = (
        "vllm.v1.core.sched.scheduler:Scheduler._try_schedule_encoder_inputs(request, start)",
        "vllm.y:new_name | vllm.x:old_name",
        "vllm.z:Class.name since 0.24",
        "vllm.z:Class.{one, other(argument)}",
        "vllm.z:Class.name optional",
    )

`module:name` demands that the module binds the name, `module:Class.name` that the class does (in
its body, as `self.name` in a method, or in a base class that can be followed), and names in
parentheses are parameters that the function must accept. Several names of one place stand in
braces, each an entry of its own. Alternatives, which are one thing in
several places, are parted by ` | `, the newest first. An entry that holds only from a release on,
or up to one, ends in `since` or `until` it; `boundaries.py` says which fact of a tree decides.
An entry that ends in `optional` is what the overlay does without where there is no such class, or
no such name in the module; where the class is, it is needed as any other. A base class can be
followed into modules that some entry names. Of the folders for one platform each, the tree's own
are asked about: it may lack another.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from anchors.digests import read_package
from anchors.engine.boundaries import BOUNDARIES
from anchors.engine.modules import Modules, Name, Read, bound

_FORM = re.compile(r"vllm((?:\.\w+)*):(\w+)(?:\.(\w+))?(?:\(([\w, *]*)\))?")
#: Entries about one of these folders are asked of trees that have its model.py.
PLATFORMS = ("models/deepseek_v4/nvidia", "models/deepseek_v4/amd")
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
    optional: bool = False

    def holds(self, passed: int) -> bool:
        """Whether a tree that has passed this many boundaries is asked for it."""
        return not self.word or (passed >= self.place) == (self.word == "since")


@dataclass(frozen=True)
class Missing:
    """A requirement that a tree does not meet; `found` says what is there instead."""

    requirement: Requirement
    found: str

    @property
    def need(self) -> str:
        """What needs what, in the words that every verb uses."""
        return f"vision_exp/{self.requirement.used_by} needs {self.requirement.text}"

    @property
    def cause(self) -> str:
        """What is gone, the same for all that needs it: of alternatives the newest place counts."""
        return self.found.partition("; ")[0]


@dataclass(frozen=True)
class Answer:
    """What a tree has of the requirements: how many were asked, what is lost, what it lacks that
    the overlay does without."""

    asked: int
    lost: tuple[Missing, ...]
    without: tuple[Requirement, ...]


def parse(text: str, used_by: str) -> Requirement:
    """Read one entry. Raises BadRequirement."""
    entry = text.removesuffix(" optional")
    match = _CONDITION.fullmatch(entry)
    names, word, release = match.groups() if match else (entry, "", "")
    found = tuple(_name(part, text, used_by) for part in names.split(" | "))
    place = _place(word, release, text, used_by)
    return Requirement(text, used_by, found, word, place, entry != text)


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
    return stated(read_package(overlay))


def stated(overlay: Mapping[str, bytes]) -> tuple[Requirement, ...]:
    """All entries of a package, relative path -> bytes, by module. Raises BadRequirement."""
    found = [_stated(file, data) for file, data in overlay.items() if b"REQUIRES" in data]
    return tuple(entry for entries in found for entry in entries)


@functools.lru_cache(maxsize=64)
def _stated(file: str, data: bytes) -> tuple[Requirement, ...]:
    node = bound(ast.parse(data, file).body, "REQUIRES") if file.endswith(".py") else None
    if not isinstance(node, (ast.Assign, ast.AnnAssign)):
        return ()
    return tuple(parse(one, file) for text in _literal(node, file) for one in _each(text))


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
    return answer(requirements, read).lost


def answer(requirements: tuple[Requirement, ...], read: Read) -> Answer:
    """What a tree has of the requirements. `read(path)` gives a file's bytes or None."""
    modules = Modules(read)
    asked = _holding(requirements, modules)
    lost: list[Missing] = []
    without: list[Requirement] = []
    for requirement in asked:
        reasons = [modules.lack(name) for name in requirement.names]
        if not all(reasons):
            continue
        if requirement.optional and not any(map(modules.has_place, requirement.names)):
            # A module that only forks have is nothing to tell of the others.
            if any(modules.has_module(name) for name in requirement.names):
                without.append(requirement)
        else:
            lost.append(Missing(requirement, "; ".join(reasons)))
    return Answer(len(asked), tuple(lost), tuple(without))


def notes(found: Answer) -> tuple[str, ...]:
    """What a person should know of a tree that meets them: what the overlay does without."""
    return tuple(f"without {one.text}, which this vLLM lacks" for one in found.without)


def _holding(requirements: tuple[Requirement, ...], modules: Modules) -> tuple[Requirement, ...]:
    there = [folder for folder in PLATFORMS if modules.has_file(f"{folder}/model.py")]
    gone = tuple(f"{folder}/" for folder in PLATFORMS if there and folder not in there)
    requirements = tuple(
        one for one in requirements if not all(n.module.startswith(gone) for n in one.names)
    )
    if not _conditional(requirements):
        return requirements
    met = [not all(modules.lack(name) for name in fact.names) for fact in facts()]
    passed = max((place for place, there in enumerate(met, 1) if there), default=0)
    return tuple(entry for entry in requirements if entry.holds(passed))


def _conditional(requirements: tuple[Requirement, ...]) -> bool:
    return any(entry.word for entry in requirements)
