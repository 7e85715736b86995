"""Which num_speculative_tokens (k) the installed vLLM takes for this checkpoint, by its own code.

Releases disagree, so the refusals in `config/speculative.py` are read and evaluated for each k:
an `if` that raises, about the number of tokens and either the checkpoint's draft depth or its
DSpark block size.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

FILE = "config/speculative.py"

#: The released checkpoint: num_nextn_predict_layers and dspark_block_size.
DEPTH, BLOCK = 3, 5
MOST = 12

_NUMBER = "num_speculative_tokens"
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}


class _Unknown(Exception):
    """An expression about something that is not known here."""


@dataclass(frozen=True)
class Rule:
    """`legal` values of k up to MOST, and the `lines` that refuse others.

    `reason` says why nothing is known (then `legal` is empty).
    """

    legal: tuple[int, ...]
    lines: tuple[int, ...]
    reason: str = ""


def legal_k(source: bytes | None, method: str = "dspark") -> Rule:
    """Evaluate the refusals of an installed `config/speculative.py`."""
    if source is None:
        return Rule((), (), f"{FILE} is missing")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return Rule((), (), f"{FILE} does not parse")
    if not any(isinstance(n, ast.Constant) and n.value == method for n in ast.walk(tree)):
        return Rule((), (), f"this vLLM has no method {method!r}")
    refusals = list(_refusals(tree))
    if not refusals:
        return Rule((), (), f"no rule about {_NUMBER} found in {FILE}")
    try:
        legal = tuple(
            k
            for k in range(1, MOST + 1)
            if not any(_applies(tests, _names(method, k)) for tests, _ in refusals)
        )
    except _Unknown as unknown:
        return Rule((), (), f"{FILE} has a rule that is not understood: {unknown}")
    return Rule(legal, tuple(line for _, line in refusals))


def _names(method: str, k: int) -> dict[str, Any]:
    return {
        "n_predict": DEPTH,
        "dspark_block_size": BLOCK,
        f"self.{_NUMBER}": k,
        "self.method": method,
    }


def _refusals(tree: ast.AST) -> Iterator[tuple[tuple[ast.expr, ...], int]]:
    """(all conditions on the way, line) of each `raise` that a rule about k guards."""

    def walk(node: ast.AST, conditions: tuple[ast.expr, ...]) -> Iterator[Any]:
        if isinstance(node, ast.If):
            inside = (*conditions, node.test)
            if _about_k(node.test) and any(isinstance(n, ast.Raise) for n in node.body):
                yield inside, node.lineno
            for child in node.body:
                yield from walk(child, inside)
            otherwise = (*conditions, ast.UnaryOp(ast.Not(), node.test))
            for child in node.orelse:
                yield from walk(child, otherwise)
            return
        for part in ast.iter_child_nodes(node):
            yield from walk(part, conditions)

    yield from walk(tree, ())


def _about_k(test: ast.expr) -> bool:
    text = ast.unparse(test)
    return f"self.{_NUMBER}" in text and ("n_predict" in text or "block_size" in text)


def _applies(tests: tuple[ast.expr, ...], names: dict[str, Any]) -> bool:
    """Whether all conditions hold. One that is not about k and not known counts as holding."""
    for test in tests:
        try:
            if not _value(test, names):
                return False
        except _Unknown:
            if _about_k(test):
                raise
    return True


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.Name, ast.Attribute)):
        text = ast.unparse(node)
        if text in names:
            return names[text]
        raise _Unknown(text)
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return [_value(item, names) for item in node.elts]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not _value(node.operand, names)
    if isinstance(node, ast.BoolOp):
        return _bool(node, names)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return _value(node.left, names) % _value(node.right, names)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        sign = 1 if isinstance(node.op, ast.Add) else -1
        return _value(node.left, names) + sign * _value(node.right, names)
    if isinstance(node, ast.Compare):
        values = [_value(part, names) for part in (node.left, *node.comparators)]
        pairs = zip(values, values[1:], strict=False)
        return all(_COMPARE[type(op)](a, b) for op, (a, b) in zip(node.ops, pairs, strict=True))
    raise _Unknown(ast.unparse(node))


def _bool(node: ast.BoolOp, names: dict[str, Any]) -> bool:
    """`and`/`or`, decided by the known parts where they suffice."""
    stop = isinstance(node.op, ast.Or)
    unknown: _Unknown | None = None
    for part in node.values:
        try:
            if bool(_value(part, names)) is stop:
                return stop
        except _Unknown as error:
            unknown = error
    if unknown:
        raise unknown
    return not stop
