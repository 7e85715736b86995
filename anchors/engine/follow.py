"""Where a name of vLLM leads, read from the sources as an import on one platform would go.

Statements are followed, never run: imports, plain assignments, dictionaries that are written out,
and branches on `current_platform`. What only a run could tell is a dead end, and said to be one.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass

from anchors.engine.modules import Read, binds, is_type_checking

_MOST_STEPS = 100


@dataclass(frozen=True)
class Place:
    """A class: the file that defines it, relative to the package, and its statement."""

    file: str
    node: ast.ClassDef

    def __str__(self) -> str:
        return f"class {self.node.name} in {self.file}"


class DeadEnd(Exception):
    """The name leads to no class of this vLLM; the text says where it leads."""


class Follower:
    """Follows names through the sources of one tree, as `platform` ("cuda", "rocm", ...) would."""

    def __init__(self, read: Read, platform: str) -> None:
        self._read = read
        self._platform = platform
        self._steps = 0

    def entry(self, module: str, table: str, key: str) -> ast.expr | None:
        """The value that the dictionary `table` of a module ends up with for `key`, if any.

        Raises DeadEnd for a module that is not there or does not parse.
        """
        _, tree = self._module(module)
        return self._entry(self._taken(tree.body), table, key)

    def resolve(self, module: str, name: str) -> Place:
        """The class that `name` of a module ("models/deepseek_v4") is. Raises DeadEnd."""
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise DeadEnd(f"{_dotted(module)}.{name}, a circle of imports")
        file, tree = self._module(module)
        places = {self._bound(module, file, tree, name, node) for node in self._flow(tree, name)}
        if not places:
            inner = self._lazy(tree, name)
            if inner is None:
                raise DeadEnd(f"{_dotted(module)}, which does not bind {name}")
            return self.resolve(inner, name)
        if len(places) > 1:
            raise DeadEnd(" or ".join(sorted(map(str, places))) + ", which only a run decides")
        return places.pop()

    def _module(self, module: str) -> tuple[str, ast.Module]:
        for file in (f"{module}/__init__.py", f"{module}.py"):
            data = self._read(file)
            if data is not None:
                tree = _parse(data)
                if tree is None:
                    raise DeadEnd(f"{file}, which does not parse")
                return file, tree
        raise DeadEnd(f"{_dotted(module)}, which is not there")

    def _bound(self, module: str, file: str, tree: ast.Module, name: str, node: ast.stmt) -> Place:
        if isinstance(node, ast.ClassDef):
            return Place(file, node)
        if isinstance(node, ast.ImportFrom):
            source = _source(file, node)
            aliases = {alias.asname or alias.name: alias.name for alias in node.names}
            if source is None:
                raise DeadEnd(f"{node.module}.{aliases.get(name, name)}, outside of vLLM")
            return self.resolve(source, aliases.get(name, name))
        value = getattr(node, "value", None)
        while isinstance(value, ast.IfExp) and self._decide(value.test) is not None:
            value = value.body if self._decide(value.test) else value.orelse
        if isinstance(value, ast.Name) and value.id != name:
            return self.resolve(module, value.id)
        if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
            for inner in self._flow(tree, value.value.id):
                source = self._imported(file, inner, value.value.id)
                if source is not None:
                    return self.resolve(source, value.attr)
        raise DeadEnd(f"line {node.lineno} of {file}, which only a run decides")

    def _imported(self, file: str, node: ast.stmt, name: str) -> str | None:
        """The module that an import statement binds to `name`."""
        if isinstance(node, ast.Import):
            found = [a.name for a in node.names if (a.asname or a.name) == name]
            return _inside(found[0]) if found else None
        if isinstance(node, ast.ImportFrom):
            found = [a.name for a in node.names if (a.asname or a.name) == name]
            source = _source(file, node)
            return f"{source}/{found[0]}" if found and source is not None else None
        return None

    def _flow(self, tree: ast.Module, name: str) -> tuple[ast.stmt, ...]:
        """The statements that may have bound `name` last."""
        return self._after(tree.body, name, ())

    def _after(
        self, body: list[ast.stmt], name: str, before: tuple[ast.stmt, ...]
    ) -> tuple[ast.stmt, ...]:
        for node in body:
            if isinstance(node, ast.If):
                taken = self._decide(node.test)
                ways = (
                    [node.body, node.orelse]
                    if taken is None
                    else [node.body if taken else node.orelse]
                )
                ends = [self._after(way, name, before) for way in ways]
                before = tuple(dict.fromkeys(one for end in ends for one in end))
            elif isinstance(node, ast.Try):
                tried = self._after([*node.body, *node.orelse], name, before)
                for handler in node.handlers if tried == before else ():
                    tried = self._after(handler.body, name, tried)
                before = self._after(node.finalbody, name, tried)
            elif isinstance(node, ast.With):
                before = self._after(node.body, name, before)
            elif isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                before = (node,) if node.name == name else before
            elif isinstance(node, ast.Delete):
                gone = any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
                before = () if gone else before
            elif name in binds(node):
                before = (node,)
        return before

    def _taken(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """The statements of a module that this platform runs, in order; those of both branches
        where only a run decides."""
        found: list[ast.stmt] = []
        for node in body:
            if isinstance(node, ast.If):
                taken = self._decide(node.test)
                found += self._taken(node.body) if taken is not False else []
                found += self._taken(node.orelse) if taken is not True else []
            elif isinstance(node, (ast.Try, ast.With)):
                found += self._taken([*node.body, *getattr(node, "orelse", [])])
            else:
                found.append(node)
        return found

    def _decide(self, test: ast.expr) -> bool | None:
        """Whether a condition holds on this platform; None where only a run decides."""
        if isinstance(test, ast.Constant):
            return bool(test.value)
        if is_type_checking(test):
            return False
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._decide(test.operand)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp):
            ends = isinstance(test.op, ast.Or)
            found = [self._decide(value) for value in test.values]
            return ends if ends in found else None if None in found else not ends
        if isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute):
            asked = test.func.attr.removeprefix("is_")
            if ast.unparse(test.func.value).endswith("current_platform"):
                if asked in ("rocm", "xpu", "cpu", "cuda", "tpu"):
                    return asked == self._platform
                return self._platform in ("cuda", "rocm") if asked == "cuda_alike" else None
        return None

    def _lazy(self, tree: ast.Module, name: str) -> str | None:
        """The module that a module's `__getattr__` takes `name` from, by a table of it."""
        if not self._flow(tree, "__getattr__"):
            return None
        body = self._taken(tree.body)
        for table in dict.fromkeys(target for node in body for target in binds(node)):
            value = self._entry(body, table, name)
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                return _inside(value.value)
        return None

    def _entry(self, body: list[ast.stmt], table: str, key: str) -> ast.expr | None:
        found: ast.expr | None = None
        for place, node in enumerate(body):
            value = getattr(node, "value", None)
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and table in binds(node):
                found = self._item(body[:place], value, key)
            elif isinstance(node, ast.AugAssign) and table in binds(node):
                found = self._item(body[:place], value, key) or found
            elif isinstance(node, ast.Assign) and _is_item(node.targets[0], table, key):
                found = value
            elif isinstance(node, ast.Delete) and _is_item(node.targets[0], table, key):
                found = None
            elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
                called = ast.unparse(value.func)
                if called == f"{table}.update":
                    found = self._item(body[:place], value, key) or found
                elif called == f"{table}.pop" and _is_key(value.args[0], key):
                    found = None
        return found

    def _item(self, body: list[ast.stmt], value: ast.expr | None, key: str) -> ast.expr | None:
        """The value for `key` of an expression that gives a dictionary."""
        if isinstance(value, ast.Name):
            return self._entry(body, value.id, key)
        if isinstance(value, ast.BinOp):
            right = self._item(body, value.right, key)
            return right or self._item(body, value.left, key)
        parts: list[tuple[ast.expr | None, ast.expr]] = []
        if isinstance(value, ast.Dict):
            parts = list(zip(value.keys, value.values, strict=True))
        elif isinstance(value, ast.Call):
            parts = [(None, argument) for argument in value.args]
            parts += [(k.arg and ast.Constant(k.arg), k.value) for k in value.keywords]  # type: ignore[misc]
        for name, one in reversed(parts):
            if name is None:
                inner = self._item(body, one, key)
                if inner is not None:
                    return inner
            elif _is_key(name, key):
                return one
        return None


@functools.lru_cache(maxsize=40)
def imported(file: str, data: bytes) -> frozenset[str]:
    """Modules of vLLM, as paths, that a file imports, or names in them that it imports."""
    tree = _parse(data)
    found: set[str | None] = set()
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.ImportFrom):
            source = _source(file, node)
            found |= {source, *(f"{source}/{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {_inside(alias.name) for alias in node.names}
    return frozenset(one for one in found if one)


def _is_key(node: ast.expr, key: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == key


def _is_item(node: ast.expr, table: str, key: str) -> bool:
    named = isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)
    return named and node.value.id == table and _is_key(node.slice, key)  # type: ignore[attr-defined]


def _source(file: str, node: ast.ImportFrom) -> str | None:
    """The module that `from ... import` names, as a path; None outside of vLLM."""
    if not node.level:
        return _inside(node.module or "")
    folders = file.split("/")[: -node.level]
    return "/".join([*folders, *(node.module or "").split(".")]).rstrip("/")


def _inside(module: str) -> str | None:
    path = module.replace(".", "/")
    return path.removeprefix("vllm/") if path.startswith("vllm/") else None


def _dotted(module: str) -> str:
    return f"vllm.{module}".replace("/", ".")


@functools.lru_cache(maxsize=40)
def _parse(data: bytes) -> ast.Module | None:
    try:
        return ast.parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
