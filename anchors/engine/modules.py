"""The modules of a tree, parsed and never imported, and whether they have a name."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Read = Callable[[str], "bytes | None"]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Name:
    """One alternative: a name in a module of vLLM, or in a class there."""

    module: str
    owner: str | None
    name: str
    parameters: tuple[str, ...] | None

    @property
    def files(self) -> tuple[str, str]:
        """Where the module may lie, relative to the package."""
        return f"{self.module}.py", f"{self.module}/__init__.py" if self.module else "__init__.py"


class Modules:
    """Parsed modules of one tree, and questions to them."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._parsed: dict[str, ast.Module | None] = {}

    def lack(self, name: Name) -> str:
        """Why the tree does not have `name`; empty if it does."""
        module = self._module(name.files)
        shown = "vllm." + name.module.replace("/", ".")
        if module is None:
            return f"{shown} is missing or does not parse"
        if name.owner is None:
            node = bound(module.body, name.name)
            return _verdict(node, name, f"{shown} does not bind {name.name}", _near(module, name))
        owner = bound(module.body, name.owner)
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
        node = bound(owner.body, name) or _on_self(owner).get(name)
        if node is not None:
            return node
        seen.add(owner.name)
        for base in owner.bases:
            inner = base.value if isinstance(base, ast.Subscript) else base
            if not isinstance(inner, ast.Name) or inner.id in seen:
                continue
            parent = bound(module.body, inner.id)
            if isinstance(parent, ast.ClassDef):
                node = self._in_class(parent, module, name, seen)
            elif isinstance(parent, ast.ImportFrom) and (parent.module or "").startswith("vllm."):
                path = (parent.module or "").removeprefix("vllm.").replace(".", "/")
                other = self._module((f"{path}.py", f"{path}/__init__.py"))
                found = bound(other.body, inner.id) if other else None
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


def bound(body: list[ast.stmt], name: str) -> ast.AST | None:
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
