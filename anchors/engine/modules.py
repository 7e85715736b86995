"""The modules of a tree, parsed and never imported, and whether they have a name."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Mapping
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
        self._parsed: dict[str, Scope | None] = {}

    def lack(self, name: Name) -> str:
        """Why the tree does not have `name`; empty if it does."""
        module = self._module(name.files)
        shown = "vllm." + name.module.replace("/", ".")
        if module is None:
            return unusable(name.files[0])
        if name.owner is None:
            node = module.names.get(name.name)
            return _verdict(node, name, f"{shown} does not bind {name.name}", module)
        owner = module.names.get(name.owner)
        if owner is None:
            return f"{shown} has no {name.owner}{_closest(name.owner, module)}"
        if not isinstance(owner, Scope):
            return (
                ""
                if isinstance(owner, (ast.Import, ast.ImportFrom))
                else (f"{shown}:{name.owner} is no class")
            )
        node = self._in_class(owner, module, name.name, set())
        absent = f"{shown}:{name.owner} has no {name.name}"
        return _verdict(node, name, absent, owner)

    def has_place(self, name: Name) -> bool:
        """Whether there is the class of `name`; of a name that is in none, the name itself."""
        module = self._module(name.files)
        return module is not None and (name.owner or name.name) in module.names

    def has_module(self, name: Name) -> bool:
        """Whether the tree has the module of `name`."""
        return self._module(name.files) is not None

    def has_file(self, path: str) -> bool:
        """Whether the tree has a file, which is not empty."""
        return bool(self._read(path))

    def _module(self, paths: tuple[str, str]) -> Scope | None:
        key = paths[0]
        if key not in self._parsed:
            data = self._read(paths[1])  # a package goes before a module of its name
            data = self._read(paths[0]) if data is None else data
            self._parsed[key] = None if data is None else _parse(data)
        return self._parsed[key]

    def _in_class(self, owner: Scope, module: Scope, name: str, seen: set[str]) -> Bound | None:
        node = owner.names.get(name) or owner.on_self.get(name)
        if node is not None:
            return node
        seen.add(owner.name)
        for base in owner.bases:
            if base in seen:
                continue
            parent = module.names.get(base)
            if isinstance(parent, Scope):
                node = self._in_class(parent, module, name, seen)
            elif isinstance(parent, ast.ImportFrom) and (parent.module or "").startswith("vllm."):
                path = (parent.module or "").removeprefix("vllm.").replace(".", "/")
                other = self._module((f"{path}.py", f"{path}/__init__.py"))
                found = other.names.get(base) if other else None
                if other is not None and isinstance(found, Scope):
                    node = self._in_class(found, other, name, seen)
            if node is not None:
                return node
        return None


def unusable(path: str) -> str:
    """What is said of a module, `path` in the package, that is not there or cannot be read."""
    shown = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"vllm.{shown}".rstrip(".") + " is missing or does not parse"


@dataclass(frozen=True)
class Scope:
    """What a module or class binds: name -> the last statement that does, or the class there.

    `on_self` is what the methods of a class set on `self`; `bases` are the plain names of its base
    classes. Bodies of functions are dropped: the trees of all modules together are large.
    """

    name: str
    lineno: int
    names: Mapping[str, Bound]
    on_self: Mapping[str, ast.stmt]
    bases: tuple[str, ...]


Bound = ast.stmt | Scope


@functools.lru_cache(maxsize=400)
def _parse(data: bytes) -> Scope | None:
    """Most of a tree's modules are the same in the next one that is judged."""
    try:
        return _scope("", 0, ast.parse(data).body, ())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _scope(name: str, lineno: int, body: list[ast.stmt], bases: tuple[str, ...]) -> Scope:
    names: dict[str, Bound] = {}
    on_self: dict[str, ast.stmt] = {}
    for node in _statements(body):
        if isinstance(node, ast.ClassDef):
            inner = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
            plain = tuple(base.id for base in inner if isinstance(base, ast.Name))
            names[node.name] = _scope(node.name, node.lineno, node.body, plain)
        elif isinstance(node, _FUNCTIONS):
            names[node.name] = node
            if name:
                on_self.update(_set_on_self(node.body))
            node.body = []
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                names.pop(target.id if isinstance(target, ast.Name) else "", None)
        else:
            names.update(dict.fromkeys(binds(node), node))
    return Scope(name, lineno, names, on_self, bases)


def binds(node: ast.stmt) -> list[str]:
    """The names that an import or an assignment binds."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name.split(".")[0] for alias in node.names]
    return [target.id for target in _targets(node) if isinstance(target, ast.Name)]


def _targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        found: list[ast.expr] = node.targets
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.For, ast.AsyncFor)):
        found = [node.target]
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        found = [item.optional_vars for item in node.items if item.optional_vars]
    else:
        return []
    for target in found:
        if isinstance(target, (ast.Tuple, ast.List)):
            found = [*found, *target.elts]
    return found


def _set_on_self(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Where statements set `self.name`, by name. Expressions, most of a function, are passed by."""
    found: dict[str, ast.stmt] = {}
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        for target in _targets(node):
            if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
                found[target.attr] = node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, part, ())
    return found


def _verdict(node: Bound | None, name: Name, absent: str, scope: Scope) -> str:
    if node is None:
        return absent + _closest(name.name, scope)
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
    """Statements of a body, also those under if, try and with, not those in functions.

    What stands under TYPE_CHECKING is not there when the server runs, except in a module that gives
    its names by `__getattr__`.
    """
    lazy = any(isinstance(node, _FUNCTIONS) and node.name == "__getattr__" for node in body)
    for node in body:
        if isinstance(node, ast.If) and is_type_checking(node.test) and not lazy:
            yield from _statements(node.orelse)
            continue
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.For)):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def is_type_checking(node: ast.expr) -> bool:
    """Whether an expression is `TYPE_CHECKING`, or `typing.TYPE_CHECKING`."""
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return name == "TYPE_CHECKING"


def bound(body: list[ast.stmt], name: str) -> ast.stmt | None:
    """The last statement that binds `name` in this scope."""
    return next((node for node in reversed(list(_statements(body))) if name in binds(node)), None)


def _closest(wanted: str, scope: Scope) -> str:
    import difflib

    names = [n for n, node in scope.names.items() if isinstance(node, (*_FUNCTIONS, Scope))]
    close = difflib.get_close_matches(wanted, names, n=2, cutoff=0.75)
    return f" (nearest: {', '.join(close)})" if close else ""
