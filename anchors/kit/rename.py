"""Finds the draft loaders' rename of the gate bias, in any shape it has been seen in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anchors.kit.anchor import Drift, Match, Values, exactly_one, top_level

if TYPE_CHECKING:
    import libcst as cst

OLD = ".ffn.gate.bias"
NEW = ".ffn.gate.e_score_correction_bias"
FACT = f'<name>.replace("{OLD}", "{NEW}") in the method load_weights of a top-level class'


@dataclass(frozen=True)
class Rename:
    """The class that loads the draft, its load_weights, and the path down to the rename call."""

    owner: cst.ClassDef
    method: cst.FunctionDef
    path: tuple[cst.CSTNode, ...]


def find(module: cst.Module) -> Rename:
    """The one rename. Raises Drift when there is none, or more than one."""
    import libcst as cst

    found = []
    for owner in top_level(module):
        if isinstance(owner, cst.ClassDef):
            for method in owner.body.body:
                if isinstance(method, cst.FunctionDef) and method.name.value == "load_weights":
                    found += [Rename(owner, method, path) for path in _paths(method, ())]
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
    line, indent = _place(module, rename.owner, _statement(rename.path))
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
    found = [path] if _is_rename(node) else []
    for child in node.children:
        found += _paths(child, path)
    return found


def _is_rename(node: cst.CSTNode) -> bool:
    import libcst as cst

    return (
        isinstance(node, cst.Call)
        and isinstance(node.func, cst.Attribute)
        and node.func.attr.value == "replace"
        and len(node.args) >= 2
        and [_text(argument.value) for argument in node.args[:2]] == [OLD, NEW]
    )


def _text(node: cst.CSTNode) -> str | None:
    import libcst as cst

    if isinstance(node, (cst.SimpleString, cst.ConcatenatedString)):
        value = node.evaluated_value
        return value if isinstance(value, str) else None
    return None


def _statement(path: tuple[cst.CSTNode, ...]) -> cst.CSTNode:
    """The statement to stand in front of: the rename's own, or the `if` that guards it."""
    import libcst as cst

    place = max(
        i
        for i, node in enumerate(path)
        if isinstance(node, (cst.SimpleStatementLine, cst.SimpleStatementSuite))
    )
    guard = place - 1 if isinstance(path[place - 1], cst.If) else place - 2
    node = path[guard]
    suite = isinstance(path[place], cst.SimpleStatementSuite)
    if not isinstance(node, cst.If) or not (suite or _mentions(node.test)):
        return path[place]
    while isinstance(path[guard - 1], cst.If):  # an `elif`: nothing can stand in front of it
        guard -= 1
    return path[guard]


def _mentions(node: cst.CSTNode) -> bool:
    return _text(node) == OLD or any(_mentions(child) for child in node.children)


def _params(method: cst.FunctionDef) -> str:
    """The local that holds `dict(self.named_parameters())`, or "" where that is not clear."""
    import libcst as cst
    from libcst import matchers as m

    shape = m.Assign(
        targets=[m.AssignTarget(target=m.SaveMatchedNode(m.Name(), "local"))],
        value=m.Call(
            func=m.Name("dict"),
            args=[m.Arg(m.Call(func=m.Attribute(attr=m.Name("named_parameters"))))],
        ),
    )
    found = m.extractall(method, shape)
    local = found[0]["local"] if len(found) == 1 else None
    return local.value if isinstance(local, cst.Name) else ""


def _place(module: cst.Module, owner: cst.ClassDef, statement: cst.CSTNode) -> tuple[int, str]:
    """0-based line and indentation of `statement`, which lies in top-level class `owner`.

    Positions are computed for that class alone: for whole files they cost twice the parse.
    """
    from libcst.metadata import MetadataWrapper, PositionProvider

    index = module.body.index(owner)
    before = module.with_changes(body=module.body[:index], footer=(), has_trailing_newline=True)
    alone = module.with_changes(header=(), body=[owner], footer=())
    start = MetadataWrapper(alone, unsafe_skip_copy=True).resolve(PositionProvider)[statement].start
    above = before.code.count("\n") if index or module.header else 0
    line = above + start.line - 1
    source = module.code.split("\n")[line]
    indent = source[: len(source) - len(source.lstrip())]
    text = module.code_for_node(statement).lstrip()
    if len(indent) != start.column or not source:
        raise Drift(f"the line of `{text.splitlines()[0]}` where LibCST says it is", 0)
    return line, indent
