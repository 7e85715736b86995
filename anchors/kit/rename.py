"""Finds the draft loaders' rename of the gate bias, in any shape that can be proven right."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from anchors.kit.anchor import Drift, Match, Values, exactly_one
from anchors.kit.draft_flow import Flow
from anchors.kit.draft_names import NEW, OLD, Const, Unproven
from anchors.kit.draft_values import constants

if TYPE_CHECKING:
    import libcst as cst

FACT = (
    f'<name>.replace("{OLD}", "{NEW}") in load_weights of a top-level class, or its helper method'
)
_BLOCK = re.compile(r"^[ \t]*# >>> vision-exp:.*?# <<< vision-exp:[^\n]*$", re.M | re.S)
_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True)
class Rename:
    """The class that loads the draft, its load_weights, and the path down to the rename call."""

    source: str
    tree: ast.Module
    owner: ast.ClassDef
    loader: ast.FunctionDef
    path: tuple[ast.AST, ...]


@lru_cache(maxsize=1)  # two sites of one file ask, one after the other
def find(module: cst.Module) -> Rename:
    """The one rename. Raises Drift when there is none, or more than one."""
    # A proof looks into its own result: our blocks are blanked, so that lines keep their numbers.
    source = _BLOCK.sub(lambda block: "\n" * block.group().count("\n"), module.code)
    tree = ast.parse(source.encode())
    texts = _texts(tree)
    found = []
    for owner in tree.body:
        if not isinstance(owner, ast.ClassDef):
            continue
        for loader in owner.body:
            if isinstance(loader, ast.FunctionDef) and loader.name == "load_weights":
                paths = [p for n in owner.body for p in _paths(n, (owner,), texts)]
                found += [Rename(source, tree, owner, loader, path) for path in paths]
    exactly_one(FACT, len(found))
    return found[0]


@lru_cache(maxsize=1)
def locate(module: cst.Module) -> Match:
    """The line in front of the statement that renames, with the names the edit must use.

    Raises Drift where an edit there would not give `bias_vl` the way of the bias.
    """
    rename = find(module)
    try:
        statement, name, (line, indent) = spot(rename)
        parameters = Flow(rename.tree, rename.owner, statement, name).follow(rename.loader)
    except Unproven as reason:
        raise Drift(f"{FACT}, shown to load bias_vl as it loads bias ({reason})", 0) from reason
    return Match(line=line, indent=indent, names=(("name", name), ("params", parameters)))


def spot(rename: Rename) -> tuple[ast.stmt, str, tuple[int, str]]:
    """The statement to stand in front of, the variable that is renamed, and the place (0-based
    line, indentation). Raises Unproven where there is none for an edit."""
    call = rename.path[-1]
    function = call.func if isinstance(call, ast.Call) else None
    base = function.value if isinstance(function, ast.Attribute) else None
    statement = _statement(rename.source, rename.path, _texts(rename.tree))
    if not isinstance(base, ast.Name):
        raise Unproven("what is renamed is no variable")
    if any(isinstance(n, _SCOPES) for n in rename.path[rename.path.index(statement) :]):
        raise Unproven("the rename stands in a lambda or a comprehension")
    return statement, base.id, _place(rename.source, statement)


def render(match: Match, values: Values) -> str:
    """The remap. It ends in a name `.ffn.gate.bias` is no part of, so nothing renames it twice."""
    names = dict(match.names)
    name, params = names["name"], names["params"]
    text = (
        f'if {name}.endswith(".ffn.gate.bias_vl"):\n'
        f'    {name} = {name}.removesuffix("bias_vl") + "e_score_correction_bias_vl"\n'
    )
    if params:
        text += f"    if {name} not in {params}:\n        raise KeyError({name})\n"
    return text


def _paths(
    node: ast.AST, above: tuple[ast.AST, ...], texts: dict[str, str]
) -> Iterator[tuple[ast.AST, ...]]:
    path = (*above, node)
    if _is_rename(path, texts):
        yield path
    for child in ast.iter_child_nodes(node):
        yield from _paths(child, path, texts)


def _is_rename(path: tuple[ast.AST, ...], texts: dict[str, str]) -> bool:
    """Whether a path ends in the rename: of the whole suffix, or of its end alone (`.bias`, in
    amd/mtp.py) behind an `if` that asks for the whole one."""
    node = path[-1]
    if not (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "replace"
        and len(node.args) >= 2
    ):
        return False
    old, new = (_text(argument, texts) for argument in node.args[:2])
    if (old, new) == (OLD, NEW):
        return True
    ends = bool(old and new) and OLD.endswith(f"{old}") and OLD[: -len(f"{old}")] + f"{new}" == NEW
    return ends and any(
        isinstance(above, ast.If) and below in above.body and _mentions(above.test, texts)
        for above, below in zip(path, path[1:], strict=False)
    )


def _text(node: ast.AST, texts: dict[str, str]) -> str | None:
    """A literal, or a constant of the module or of the class."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.Name):
        return texts.get(node.id)
    return texts.get(f".{node.attr}") if isinstance(node, ast.Attribute) else None


def _texts(tree: ast.Module) -> dict[str, str]:
    known = constants(tree)
    return {n: str(v.values[0]) for n, v in known.items() if isinstance(v, Const)}


def _mentions(node: ast.AST, texts: dict[str, str]) -> bool:
    return any(_text(each, texts) == OLD for each in ast.walk(node))


def _statement(source: str, path: tuple[ast.AST, ...], texts: dict[str, str]) -> ast.stmt:
    """The statement to stand in front of: the rename's own, or the `if` that guards it.

    A guard is an `if` around nothing but the rename, or one that asks for the old name.
    """
    place = max(i for i, node in enumerate(path) if isinstance(node, ast.stmt))
    node, guard = path[place], place - 1
    above = path[guard]
    alone = isinstance(above, ast.If) and above.body == [node]
    if alone or (isinstance(above, ast.If) and _mentions(above.test, texts)):
        while _is_elif(source, path[guard]):  # nothing can stand in front of it
            guard -= 1
        node = path[guard]
    if not isinstance(node, ast.stmt):
        raise Drift("statement that the rename stands in", 0)
    return node


def _is_elif(source: str, node: ast.AST) -> bool:
    """An `elif` is an `if` in the place of the `else`, but for its word."""
    if not isinstance(node, ast.If):
        return False
    line = source.split("\n")[node.lineno - 1].encode()
    return line[node.col_offset :].startswith(b"elif")


def _place(source: str, statement: ast.stmt) -> tuple[int, str]:
    """0-based line and indentation of a statement. Raises Unproven for one not on its own line."""
    if "\r" in source.replace("\r\n", ""):
        raise Unproven("a line ends in a carriage return alone")
    line = source.split("\n")[statement.lineno - 1].encode()
    indent = line[: statement.col_offset]
    if indent.strip():
        raise Unproven(f"line {statement.lineno} holds more than one statement")
    return statement.lineno - 1, indent.decode()
