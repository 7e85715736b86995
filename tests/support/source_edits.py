"""Edits of real vLLM source: some must not matter to the patcher, some must make it refuse.

They are found with `ast` alone, so they share nothing with the patcher's own way of looking.
Every function takes the text of a module and returns the edited text.
"""

from __future__ import annotations

import ast
import copy
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

OLD, NEW = ".ffn.gate.bias", ".ffn.gate.e_score_correction_bias"

Definition = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
Import = (ast.Import, ast.ImportFrom)


# --- finding ------------------------------------------------------------------------------------


def find_class(tree: ast.Module, name: str) -> ast.ClassDef:
    (found,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    return found


def rename_statement(tree: ast.Module) -> ast.stmt:
    """The whole statement (with its guard, if any) that renames the gate's bias."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    (call,) = (node for node in ast.walk(tree) if _renames_bias(node))
    node: ast.AST = call
    while not isinstance(node, ast.Assign):
        node = parents[node]
    guard = parents[node]
    guarded = isinstance(guard, ast.If) and OLD in ast.unparse(guard.test)
    found = guard if guarded else node
    assert isinstance(found, ast.stmt)
    return found


def _renames_bias(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "replace"
        and [a.value for a in node.args if isinstance(a, ast.Constant)][:2] == [OLD, NEW]
    )


def span(text: str, node: ast.stmt) -> tuple[int, int]:
    """(start, end) offsets of the whole lines that a statement and its decorators take."""
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    starts = _line_starts(text)
    return starts[first - 1], starts[node.end_lineno or node.lineno]


def _line_starts(text: str) -> list[int]:
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def _own_line_statements(text: str) -> Iterator[ast.stmt]:
    """Every statement that begins its own line."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            if not lines[first - 1][: node.col_offset].strip():
                yield node


# --- edits that must not matter -----------------------------------------------------------------


def blank_lines(text: str) -> str:
    return _before_each_statement(text, lambda indent: "\n")


def comments(text: str) -> str:
    return _before_each_statement(text, lambda indent: f"{indent}# a remark, éè 标\n")


def _before_each_statement(text: str, line: Callable[[str], str]) -> str:
    starts = _line_starts(text)
    marks = {}
    for node in _own_line_statements(text):
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        marks[starts[first - 1]] = line(" " * node.col_offset)
    for offset in sorted(marks, reverse=True):
        text = text[:offset] + marks[offset] + text[offset:]
    return text


def narrow_format(text: str) -> str:
    """Another line length and the other quotes."""
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--config", "line-length=50"]
    command += ["--config", "format.quote-style='single'", "-"]
    return subprocess.run(
        command, input=text, capture_output=True, text=True, check=True, encoding="utf-8"
    ).stdout


def unparsed(text: str) -> str:
    """The same syntax tree with no trace of the layout."""
    return ast.unparse(ast.parse(text)) + "\n"


def reordered_imports(text: str) -> str:
    """Each run of adjacent top-level imports, in reverse."""
    body = ast.parse(text).body
    runs: list[list[ast.stmt]] = []
    for before, node in zip([None, *body], body):  # noqa: B905 (one longer on purpose)
        future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if not isinstance(node, Import) or future:
            continue
        if runs and runs[-1][-1] is before:
            runs[-1].append(node)
        else:
            runs.append([node])
    for run in reversed(runs):
        start, end = span(text, run[0])[0], span(text, run[-1])[1]
        pieces = [text[slice(*span(text, node))] for node in reversed(run)]
        text = text[:start] + "".join(pieces) + text[end:]
    return text


def crlf(text: str) -> str:
    return text.replace("\n", "\r\n")


def moved_code(text: str) -> str:
    """All top-level classes and functions, in reverse order, each keeping its own lines."""
    definitions = [node for node in ast.parse(text).body if isinstance(node, Definition)]
    spans = [span(text, node) for node in definitions]
    pieces = [text[slice(*place)] for place in spans]
    for (start, end), piece in zip(reversed(spans), pieces, strict=True):
        text = text[:start] + piece + text[end:]
    return text


def renamed_locals(text: str) -> str:
    """Every local variable of every function gets another name."""
    tree = ast.parse(text)
    outer = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef | ast.Module)]
    for owner in outer:
        for node in owner.body:
            if isinstance(node, ast.FunctionDef):
                _rename_locals(node)
    return ast.unparse(tree) + "\n"


def _rename_locals(function: ast.FunctionDef) -> None:
    nodes = list(ast.walk(function))
    shared = {name for n in nodes if isinstance(n, ast.Global | ast.Nonlocal) for name in n.names}
    parameters = {n.arg for n in nodes if isinstance(n, ast.arg)}
    imported = {
        (alias.asname or alias.name).split(".")[0]
        for n in nodes
        if isinstance(n, ast.Import | ast.ImportFrom)
        for alias in n.names
    }
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    locals_ = stored - shared - parameters - imported
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in locals_:
            node.id += "_other"


def added_base(text: str) -> str:
    """Every top-level class gets one more base, first in the list."""
    for node in reversed([n for n in ast.parse(text).body if isinstance(n, ast.ClassDef)]):
        start = _line_starts(text)[node.lineno - 1]
        head, tail = text[:start], text[start:]
        if node.bases:
            tail = re.sub(r"\(", "(AddedBase, ", tail, count=1)
        else:
            tail = tail.replace(f"class {node.name}", f"class {node.name}(AddedBase)", 1)
        text = head + tail
    return text


def added_parameter(text: str) -> str:
    """Every method takes one more keyword."""
    tree = ast.parse(text)
    for owner in ast.walk(tree):
        if isinstance(owner, ast.ClassDef):
            for node in owner.body:
                if isinstance(node, ast.FunctionDef):
                    node.args.kwonlyargs.append(ast.arg("added_parameter"))
                    node.args.kw_defaults.append(ast.Constant(None))
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


HARMLESS: dict[str, Callable[[str], str]] = {
    "blank-lines": blank_lines,
    "comments": comments,
    "narrow-format": narrow_format,
    "unparsed": unparsed,
    "reordered-imports": reordered_imports,
    "crlf": crlf,
    "moved-code": moved_code,
    "renamed-locals": renamed_locals,
    "added-base": added_base,
    "added-parameter": added_parameter,
}


# --- edits that must be refused, for an anchor that is a class ------------------------------------


def class_absent(text: str, name: str) -> str:
    start, end = span(text, find_class(ast.parse(text), name))
    return text[:start] + text[end:]


def class_twice(text: str, name: str) -> str:
    start, end = span(text, find_class(ast.parse(text), name))
    return text[:end] + "\n\n" + text[start:end] + text[end:]


def class_renamed(text: str, name: str) -> str:
    return re.sub(rf"^class {name}\b", f"class {name}Renamed", text, flags=re.MULTILINE)


def class_elsewhere(text: str, name: str) -> str:
    """The class exists only inside a function."""
    start, end = span(text, find_class(ast.parse(text), name))
    inner = textwrap.indent(text[start:end], "    ")
    return f"{text[:start]}def build():\n{inner}    return {name}\n{text[end:]}"


# --- the same for an anchor that is the renaming call ---------------------------------------------


def call_absent(text: str) -> str:
    node = rename_statement(ast.parse(text))
    start, end = span(text, node)
    return f"{text[:start]}{' ' * node.col_offset}pass\n{text[end:]}"


def call_twice(text: str) -> str:
    start, end = span(text, rename_statement(ast.parse(text)))
    return text[:end] + text[start:end] + text[end:]


def call_halved(text: str) -> str:
    """The old name is still looked for; what it becomes is another."""
    return text.replace(f'"{NEW}"', '".ffn.gate.score_correction"')


def call_renamed(text: str) -> str:
    return text.replace(f'"{OLD}"', '".ffn.router.bias"')


def call_elsewhere(text: str) -> str:
    """The renaming happens in a helper of the module, not in the loader."""
    node = rename_statement(ast.parse(text))
    start, end = span(text, node)
    statement = textwrap.dedent(text[start:end])
    helper = f"\n\ndef _renamed(name):\n{textwrap.indent(statement, '    ')}    return name\n"
    return f"{text[:start]}{' ' * node.col_offset}name = _renamed(name)\n{text[end:]}{helper}"


def call_unguarded(text: str) -> str:
    """The other shape in the wild: `name = name.replace(old, new)` without a condition."""
    tree = ast.parse(text)
    node = rename_statement(tree)
    if not isinstance(node, ast.If):
        return text
    start, end = span(text, node)
    bare = copy.deepcopy(node.body[0])
    return (
        text[:start] + textwrap.indent(ast.unparse(bare), " " * node.col_offset) + "\n" + text[end:]
    )


CLASS_MUTATIONS: dict[str, Callable[[str, str], str]] = {
    "absent": class_absent,
    "twice": class_twice,
    "renamed": class_renamed,
    "elsewhere": class_elsewhere,
}

CALL_MUTATIONS: dict[str, Callable[[str], str]] = {
    "absent": call_absent,
    "twice": call_twice,
    "renamed": call_renamed,
    "elsewhere": call_elsewhere,
    "half": call_halved,
}
