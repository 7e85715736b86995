"""Finds the draft loaders' rename of the gate bias, in any shape it has been seen in."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING

from anchors.kit.anchor import Drift, Match, Values, children, exactly_one, top_level, walk

if TYPE_CHECKING:
    import libcst as cst

OLD = ".ffn.gate.bias"
NEW = ".ffn.gate.e_score_correction_bias"
_MARKER = "# vision-exp looks for this line"
FACT = f'<name>.replace("{OLD}", "{NEW}") in the method load_weights of a top-level class'


@dataclass(frozen=True)
class Rename:
    """The class that loads the draft, its load_weights, and the path down to the rename call."""

    owner: cst.ClassDef
    method: cst.FunctionDef
    path: tuple[cst.CSTNode, ...]


@lru_cache(maxsize=1)  # two sites of one file ask, one after the other
def find(module: cst.Module) -> Rename:
    """The one rename. Raises Drift when there is none, or more than one."""
    import libcst as cst

    found = []
    for owner in top_level(module):
        if isinstance(owner, cst.ClassDef):
            for method in owner.body.body:
                if isinstance(method, cst.FunctionDef) and method.name.value == "load_weights":
                    found += [
                        Rename(owner, method, path) for path in _paths(method, (owner, owner.body))
                    ]
    exactly_one(FACT, len(found))
    return found[0]


def locate(module: cst.Module) -> Match:
    """The line in front of the statement that renames, with the names the edit must use."""
    import libcst as cst

    rename = find(module)
    call = rename.path[-1]
    base = cst.ensure_type(cst.ensure_type(call, cst.Call).func, cst.Attribute).value
    if not isinstance(base, cst.Name):
        raise Drift(FACT, 0)
    line, indent = _place(module, rename.path, _statement(rename.path))
    return Match(
        line=line,
        indent=indent,
        names=(("name", base.value), ("params", _params(rename.method))),
    )


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


def _paths(node: cst.CSTNode, above: tuple[cst.CSTNode, ...]) -> list[tuple[cst.CSTNode, ...]]:
    path = (*above, node)
    found = [path] if _is_rename(path) else []
    for child in children(node):
        found += _paths(child, path)
    return found


def _is_rename(path: tuple[cst.CSTNode, ...]) -> bool:
    """Whether a path ends in the rename: of the whole suffix, or of its end alone (`.bias`, in
    amd/mtp.py) behind an `if` that asks for the whole one."""
    import libcst as cst

    node = path[-1]
    if not (
        isinstance(node, cst.Call)
        and isinstance(node.func, cst.Attribute)
        and node.func.attr.value == "replace"
        and len(node.args) >= 2
    ):
        return False
    old, new = (_text(argument.value) for argument in node.args[:2])
    if (old, new) == (OLD, NEW):
        return True
    ends = bool(old and new) and OLD.endswith(f"{old}") and OLD[: -len(f"{old}")] + f"{new}" == NEW
    return ends and any(
        isinstance(above, cst.If) and below is above.body and _mentions(above.test)
        for above, below in zip(path, path[1:], strict=False)
    )


def _text(node: cst.CSTNode) -> str | None:
    import libcst as cst

    if isinstance(node, (cst.SimpleString, cst.ConcatenatedString)):
        value = node.evaluated_value
        return value if isinstance(value, str) else None
    return None


def _statement(path: tuple[cst.CSTNode, ...]) -> cst.CSTNode:
    """The statement to stand in front of: the rename's own, or the `if` that guards it.

    A guard is an `if` around nothing but the rename, or one that asks for the old name.
    """
    import libcst as cst

    place = max(
        i
        for i, node in enumerate(path)
        if isinstance(node, (cst.SimpleStatementLine, cst.SimpleStatementSuite))
    )
    guard = place - 1 if isinstance(path[place - 1], cst.If) else place - 2
    node = path[guard]
    block = path[place - 1]
    alone = not isinstance(block, cst.IndentedBlock) or len(block.body) == 1
    if not isinstance(node, cst.If) or not (alone or _mentions(node.test)):
        return path[place]
    while isinstance(path[guard - 1], cst.If):  # an `elif`: nothing can stand in front of it
        guard -= 1
    return path[guard]


def _mentions(node: cst.CSTNode) -> bool:
    return _text(node) == OLD or any(_mentions(child) for child in children(node))


def _params(method: cst.FunctionDef) -> str:
    """The local that holds `dict(self.named_parameters())`, or "" where that is not clear."""
    import libcst as cst

    found = []
    for node in walk(method):
        if isinstance(node, cst.Assign) and _is_parameters(node.value):
            found += [target.target for target in node.targets]
    return found[0].value if len(found) == 1 and isinstance(found[0], cst.Name) else ""


def _is_parameters(value: cst.BaseExpression) -> bool:
    import libcst as cst

    if not (isinstance(value, cst.Call) and isinstance(value.func, cst.Name)):
        return False
    inner = value.args[0].value if len(value.args) == 1 else None
    return (
        value.func.value == "dict"
        and isinstance(inner, cst.Call)
        and isinstance(inner.func, cst.Attribute)
        and inner.func.attr.value == "named_parameters"
    )


def _place(
    module: cst.Module, path: tuple[cst.CSTNode, ...], statement: cst.CSTNode
) -> tuple[int, str]:
    """0-based line and indentation of `statement`, which lies on `path` below `module`.

    A marker is put in front of it and looked up in the generated code, which LibCST gives back
    as it was read: position metadata would cost more than all the parsing.
    """
    import libcst as cst

    marker = cst.EmptyLine(comment=cst.Comment(_MARKER))
    marked: cst.CSTNode = statement.with_changes(leading_lines=(*_above(statement), marker))
    above = (module, *path[: path.index(statement)])
    for parent, child in zip(reversed(above), (statement, *reversed(above)), strict=False):
        marked = _with_child(parent, child, marked)
    lines = cst.ensure_type(marked, cst.Module).code.split("\n")
    places = [number for number, line in enumerate(lines) if line.strip() == _MARKER]
    exactly_one("place of the rename in the generated code", len(places))
    line = lines[places[0]]
    return places[0], line[: line.index(_MARKER)]


def _above(statement: cst.CSTNode) -> tuple[cst.EmptyLine, ...]:
    import libcst as cst

    if isinstance(statement, (cst.SimpleStatementLine, cst.If)):
        return tuple(statement.leading_lines)
    raise Drift("statement that the rename stands in, on lines of its own", 0)


def _with_child(parent: cst.CSTNode, child: cst.CSTNode, new: cst.CSTNode) -> cst.CSTNode:
    """`parent` with `new` in the place of its `child`."""
    for field in fields(parent):
        value = getattr(parent, field.name)
        if value is child:
            return parent.with_changes(**{field.name: new})
        if isinstance(value, (list, tuple)) and any(item is child for item in value):
            changed = [new if item is child else item for item in value]
            return parent.with_changes(**{field.name: changed})
    raise Drift("statement that the rename stands in", 0)
