"""What the overlay relies on at run time, checked in a tree without importing anything.

Each overlay module states it beside the code that uses it, as a literal:

    REQUIRES = (
        "vllm.v1.core.sched.scheduler:Scheduler._try_schedule_encoder_inputs(request, start)",
        "vllm.y:new_name | vllm.x:old_name",
    )

`module:name` demands that the module binds the name, `module:Class.name` that the class does (in
its body, as `self.name` in a method, or in a base class that can be followed), and names in
parentheses are parameters that the function must accept. Alternatives are parted by ` | `,
the newest first. A base class can be followed into modules that some entry names. A leading
`?` marks a module that older releases lack: where the module is missing, it is fine.
"""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from anchors.digests import package_files

Read = Callable[[str], "bytes | None"]

_FORM = re.compile(r"(\??)vllm((?:\.\w+)*):(\w+)(?:\.(\w+))?(?:\(([\w, *]*)\))?")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class BadRequirement(ValueError):
    """A REQUIRES entry that does not have the form above."""


@dataclass(frozen=True)
class Name:
    """One alternative: a name in a module of vLLM, or in a class there."""

    module: str
    owner: str | None
    name: str
    parameters: tuple[str, ...] | None
    optional: bool

    @property
    def files(self) -> tuple[str, str]:
        """Where the module may lie, relative to the package."""
        return f"{self.module}.py", f"{self.module}/__init__.py" if self.module else "__init__.py"


@dataclass(frozen=True)
class Requirement:
    """One REQUIRES entry: its text, the overlay module that states it, and its alternatives."""

    text: str
    used_by: str
    names: tuple[Name, ...]


@dataclass(frozen=True)
class Missing:
    """A requirement that a tree does not meet; `found` says what is there instead."""

    requirement: Requirement
    found: str


def parse(text: str, used_by: str) -> Requirement:
    """Read one entry. Raises BadRequirement."""
    names = []
    for part in text.split(" | "):
        match = _FORM.fullmatch(part.strip())
        if not match:
            raise BadRequirement(f"{used_by}: REQUIRES entry {text!r} is not module:name(...)")
        optional, module, first, second, parameters = match.groups()
        names.append(
            Name(
                module=module.lstrip(".").replace(".", "/"),
                owner=first if second else None,
                name=second or first,
                parameters=None
                if parameters is None
                else tuple(p.strip() for p in parameters.split(",") if p.strip()),
                optional=bool(optional),
            )
        )
    return Requirement(text, used_by, tuple(names))


def collect(overlay: str) -> tuple[Requirement, ...]:
    """All entries of the package folder `overlay`, by module. Raises BadRequirement."""
    found: list[Requirement] = []
    for file in package_files(overlay):
        if not file.endswith(".py"):
            continue
        with open(os.path.join(overlay, file), encoding="utf-8") as source:
            tree = ast.parse(source.read(), file)
        node = _bound(tree.body, "REQUIRES")
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            found += [parse(text, file) for text in _literal(node, file)]
    return tuple(found)


def files(requirements: tuple[Requirement, ...]) -> frozenset[str]:
    """Every file, relative to the package, that checking may read."""
    return frozenset(path for entry in requirements for name in entry.names for path in name.files)


def missing(requirements: tuple[Requirement, ...], read: Read) -> tuple[Missing, ...]:
    """The requirements that a tree does not meet. `read(path)` gives a file's bytes or None."""
    modules = _Modules(read)
    found: list[Missing] = []
    for requirement in requirements:
        reasons = [modules.lack(name) for name in requirement.names]
        if all(reasons):
            found.append(Missing(requirement, "; ".join(reason for reason in reasons if reason)))
    return tuple(found)


def _literal(node: ast.Assign | ast.AnnAssign, file: str) -> tuple[str, ...]:
    try:
        value = ast.literal_eval(node.value) if node.value else ()
    except ValueError as error:
        raise BadRequirement(f"{file}: REQUIRES must be a literal tuple of strings") from error
    if not isinstance(value, tuple) or not all(isinstance(text, str) for text in value):
        raise BadRequirement(f"{file}: REQUIRES must be a literal tuple of strings")
    return value


class _Modules:
    """Parsed modules of one tree, and questions to them."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._parsed: dict[str, ast.Module | None] = {}

    def lack(self, name: Name) -> str:
        """Why the tree does not have `name`; empty if it does."""
        module = self._module(name.files)
        shown = "vllm." + name.module.replace("/", ".")
        if module is None:
            return "" if name.optional else f"{shown} is missing or does not parse"
        if name.owner is None:
            node = _bound(module.body, name.name)
            return _verdict(node, name, f"{shown} does not bind {name.name}", _near(module, name))
        owner = _bound(module.body, name.owner)
        if owner is None:
            return f"{shown} has no {name.owner}{_near(module, name)}"
        if not isinstance(owner, ast.ClassDef):
            return (
                ""
                if isinstance(owner, (ast.Import, ast.ImportFrom))
                else (f"{shown}:{name.owner} is no class")
            )
        node = self._in_class(owner, module, name.name, set())
        absent = f"{shown}:{name.owner} has no {name.name}"
        return _verdict(node, name, absent, _near_member(owner, name.name))

    def _module(self, paths: tuple[str, str]) -> ast.Module | None:
        key = paths[0]
        if key not in self._parsed:
            data = self._read(paths[0])
            data = self._read(paths[1]) if data is None else data
            self._parsed[key] = None if data is None else _parse(data)
        return self._parsed[key]

    def _in_class(
        self, owner: ast.ClassDef, module: ast.Module, name: str, seen: set[str]
    ) -> ast.AST | None:
        node = _bound(owner.body, name) or _on_self(owner).get(name)
        if node is not None:
            return node
        seen.add(owner.name)
        for base in owner.bases:
            inner = base.value if isinstance(base, ast.Subscript) else base
            if not isinstance(inner, ast.Name) or inner.id in seen:
                continue
            parent = _bound(module.body, inner.id)
            if isinstance(parent, ast.ClassDef):
                node = self._in_class(parent, module, name, seen)
            elif isinstance(parent, ast.ImportFrom) and (parent.module or "").startswith("vllm."):
                path = (parent.module or "").removeprefix("vllm.").replace(".", "/")
                other = self._module((f"{path}.py", f"{path}/__init__.py"))
                found = _bound(other.body, inner.id) if other else None
                if other is not None and isinstance(found, ast.ClassDef):
                    node = self._in_class(found, other, name, seen)
            if node is not None:
                return node
        return None


@functools.lru_cache(maxsize=100)
def _parse(data: bytes) -> ast.Module | None:
    """Most of a tree's modules are the same in the next one that is judged."""
    try:
        return ast.parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _verdict(node: ast.AST | None, name: Name, absent: str, near: str) -> str:
    if node is None:
        return absent + near
    if name.parameters is None or not isinstance(node, _FUNCTIONS):
        return ""
    arguments = node.args
    given = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    lost = [
        wanted
        for wanted in name.parameters
        if wanted not in given
        and not (wanted == "*" and arguments.vararg)
        and not (wanted == "**" and arguments.kwarg)
    ]
    if not lost:
        return ""
    return (
        f"{name.name} (line {node.lineno}) does not take {', '.join(lost)}: "
        f"it takes {', '.join(given)}"
    )


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, also those under if, try and with, not those in functions."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.For)):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _bound(body: list[ast.stmt], name: str) -> ast.AST | None:
    """The last statement that binds `name` in this scope."""
    found: ast.AST | None = None
    for node in _statements(body):
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)) and node.name == name:
            found = node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            if any((a.asname or a.name.split(".")[0]) == name for a in node.names):
                found = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                found = node
    return found


@functools.lru_cache(maxsize=200)
def _on_self(owner: ast.ClassDef) -> dict[str, ast.AST]:
    """Where the methods of a class set `self.name`, by name."""
    return {
        node.attr: node
        for node in ast.walk(owner)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def _near(module: ast.Module, name: Name) -> str:
    wanted = name.owner or name.name
    names = [n.name for n in module.body if isinstance(n, (*_FUNCTIONS, ast.ClassDef))]
    return _closest(wanted, names)


def _near_member(owner: ast.ClassDef, name: str) -> str:
    return _closest(name, [n.name for n in owner.body if isinstance(n, _FUNCTIONS)])


def _closest(wanted: str, names: list[str]) -> str:
    import difflib

    close = difflib.get_close_matches(wanted, names, n=2, cutoff=0.75)
    return f" (nearest: {', '.join(close)})" if close else ""
