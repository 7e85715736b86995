"""What code outside a draft loader makes of the two names: text methods, built-ins, literals."""

from __future__ import annotations

import ast
from typing import Any

from anchors.kit.draft_names import (
    DIFFERS,
    FIRST,
    NAMED,
    NUMBERED,
    PAIR,
    PARAMETERS,
    PIECE,
    SAME,
    WEIGHTS,
    Const,
    Many,
    Name,
    Stream,
    Truth,
    Value,
    contains,
    cut,
    ends_with,
    equals,
    extended,
    is_tied,
    merged,
    piece_equals,
    replaced,
    starts_with,
    truth,
)

Env = dict[str, Value]
_DOT = Const((".",))
_LAST_DOT: dict[str, list[Value]] = {"rsplit": [_DOT, Const((1,))], "rpartition": [_DOT]}
_KEEPING = ("list", "tuple", "iter", "sorted", "reversed", "str", "dict", "bool")


def compared(op: ast.cmpop, left: Value, right: Value) -> Value:
    """A comparison, as if it were not negated."""
    is_in = isinstance(op, (ast.In, ast.NotIn))
    if is_in and isinstance(right, Name):
        return contains(right, left)
    if isinstance(op, (ast.Is, ast.IsNot, ast.Eq, ast.NotEq, ast.In, ast.NotIn)):
        if isinstance(left, Name):
            return equals(left, right)
        if isinstance(right, Name) and not is_in:
            return equals(right, left)
        if left == PIECE or right == PIECE:
            return piece_equals(right if left == PIECE else left)
    return DIFFERS if is_tied(left) or is_tied(right) else SAME


def element(source: Value) -> Value:
    """What a loop over `source` binds. Raises Unproven for one that is not the same for both."""
    if source == WEIGHTS:
        return PAIR
    if source == NUMBERED:
        return Many((SAME, PAIR))
    if source == PIECE:
        return PIECE
    if isinstance(source, Const):
        values = [v for each in source.values if _is_iterable(each) for v in each]
        return Const(tuple(values)) if values else SAME
    if isinstance(source, Many):
        found: Value | None = source.items[0] if source.items else SAME
        for item in source.items[1:]:
            found = merged(found, item)
        return found or SAME
    return DIFFERS if is_tied(source) else SAME


def items(value: Value, count: int) -> list[Value]:
    if value == PAIR and count == 2:
        return [FIRST, SAME]
    if isinstance(value, Many) and len(value.items) == count:
        return list(value.items)
    if isinstance(value, Const) and all(
        isinstance(each, (tuple, list)) and len(each) == count for each in value.values
    ):
        return [Const(tuple(each[i] for each in value.values)) for i in range(count)]
    return [PIECE if value == PIECE else DIFFERS if is_tied(value) else SAME] * count


def summed(left: Value, right: Value) -> Value:
    if isinstance(left, Name):
        return extended(left, right)
    if isinstance(right, Name):
        return DIFFERS if is_tied(left) else right
    if isinstance(left, Const) and isinstance(right, Const):
        try:
            return Const(tuple(a + b for a in left.values for b in right.values))
        except TypeError:
            return SAME
    return DIFFERS if is_tied(left) or is_tied(right) else SAME


def negated(test: Truth | None) -> Value:
    if test is None:
        return DIFFERS
    return Truth(*(None if side is None else not side for side in (test.stock, test.ours)))


def both(one: bool | None, other: bool | None, stop: bool) -> bool | None:
    if stop in (one, other):
        return stop
    return None if None in (one, other) else not stop


def of_text(name: Name, attr: str, given: list[Value]) -> Value:
    first: Value = given[0] if given else SAME
    if attr == "replace" and len(given) >= 2:
        return replaced(name, first, given[1]) if len(given) == 2 else DIFFERS
    if attr == "removesuffix":
        return cut(name, first)
    if attr == "removeprefix":
        return DIFFERS if starts_with(name, first) == DIFFERS else name
    if attr == "endswith" and len(given) == 1:
        return ends_with(name, first)
    if attr == "startswith" and len(given) == 1:
        return starts_with(name, first)
    if attr in ("split", "rsplit", "partition", "rpartition") and not any(map(is_tied, given)):
        heads, tails = zip(*(end.rpartition(".")[::2] for end in name.ends), strict=True)
        if heads[0] == heads[1] and given == _LAST_DOT.get(attr):
            return Many((SAME, *([SAME] if attr == "rpartition" else []), Name(*tails)))
        return PIECE
    if attr == "strip" and not given:
        return name
    foreign = name.mapped and not hasattr(str, attr)  # a match, a tensor
    return name if foreign and not any(map(is_tied, given)) else DIFFERS


def of_literal(literal: Any, attr: str, given: list[Value]) -> Value | None:
    if isinstance(literal, dict) and attr in ("items", "keys", "values"):
        return Const((tuple(getattr(literal, attr)()),))
    if isinstance(literal, dict) and attr == "get" and given and isinstance(given[0], Name):
        if equals(given[0], Const((literal,))) == Truth(False, False):
            return given[1] if len(given) > 1 else Const((None,))
        return DIFFERS
    return DIFFERS if any(map(is_tied, given)) else SAME


def searched(attr: str, given: list[Value], constants: Env, function: ast.expr) -> Value | None:
    """A search that asks for no end: its result is alike for both, and holds the end."""
    base = function.value if isinstance(function, ast.Attribute) else function
    compiled = constants.get(f"re:{base.id}") if isinstance(base, ast.Name) else None
    pattern = compiled or (given[0] if given else SAME)
    names = [value for value in given if is_tied(value)]
    if not names:
        return None
    if not isinstance(pattern, Const) or len(names) > 1 or not isinstance(names[0], Name):
        return DIFFERS
    text = str(pattern.values)
    if attr not in ("match", "search", "sub") or any(sign in text for sign in ("bias", "$", "\\Z")):
        return DIFFERS
    return Name(names[0].stock, names[0].ours, mapped=True)


def builtin(name: str, given: list[Value]) -> Value | None:
    first = given[0] if given else SAME
    if first == NAMED and name == "dict":
        return PARAMETERS
    if name in _KEEPING and len(given) == 1 and not isinstance(first, (Truth, Stream)):
        return first
    if name == "enumerate":
        return NUMBERED if first == WEIGHTS else None
    if name in ("any", "all") and isinstance(first, Stream):
        test = truth(first.item)
        if test is None or not test.is_shared:
            return DIFFERS
        return first.item if test.stock is (name == "all") else SAME
    if name in ("int", "float") or (name == "len" and first == PIECE):
        return SAME
    if name in ("len", "hash", "any", "all") and is_tied(first):
        return DIFFERS
    return None


def foreign(given: list[Value], obj: Value | None) -> Value:
    """The result of code outside this file: taken to treat a routing bias as any other weight,
    unless it gets the parameters too."""
    tied = [value for value in given if is_tied(value)]
    if obj is not None and is_tied(obj):
        tied.append(obj)
    if WEIGHTS in given or NUMBERED in given:
        return DIFFERS
    if not tied:
        return SAME
    names = {value.ends for value in tied if isinstance(value, Name)}
    if len(names) == 1 and all(isinstance(v, Name) for v in tied) and PARAMETERS not in given:
        return Name(*names.pop(), mapped=True)
    return DIFFERS


def constants(tree: ast.Module) -> Env:
    """Literals of the module and, with a dot, of its classes; texts of compiled patterns."""
    found: Env = {}
    twice: set[str] = set()
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for prefix, body in (("", tree.body), *((".", owner.body) for owner in classes)):
        for node in body:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    name = prefix + target.id
                    twice |= {name} & found.keys()
                    found[name] = literal(node.value) or SAME
                    call = node.value
                    if isinstance(call, ast.Call) and ast.unparse(call.func) == "re.compile":
                        found[f"re:{name}"] = literal(call.args[0]) or SAME
    return {name: value for name, value in found.items() if name not in twice}


def literal(node: ast.expr) -> Const | None:
    try:
        return Const((ast.literal_eval(node),))
    except (ValueError, TypeError, SyntaxError):
        return None


def _is_iterable(value: Any) -> bool:
    return isinstance(value, (tuple, list, set, frozenset, dict))


def sliced(base: Value, lower: Value, *, is_open: bool) -> Value:
    """`base[lower:]`, or with an end where it is not open."""
    if isinstance(base, Name):
        values = lower.values if isinstance(lower, Const) else ()
        forward = all(isinstance(value, int) and value >= 0 for value in values)
        return base if is_open and forward and not is_tied(lower) else DIFFERS
    return base if base == PIECE else DIFFERS if is_tied(base) else SAME


def is_quiet(body: list[ast.stmt], first: ast.stmt, edit: ast.stmt) -> bool:
    """Whether statements do no more than rename and return; the edit may stand at their head."""
    for node in (node for statement in body for node in ast.walk(statement)):
        quiet = isinstance(node, (ast.Assign, ast.If, ast.Pass, ast.Expr, ast.Return))
        if (isinstance(node, ast.stmt) and not quiet) or (node is edit and node is not first):
            return False
    return True


def returns(body: list[ast.stmt]) -> bool:
    """Whether any of the statements returns."""
    return any(isinstance(node, ast.Return) for each in body for node in ast.walk(each))


def one_of(values: list[Value]) -> Value | None:
    """Any of these; None: there is none."""
    found: Value | None = values[0] if values else None
    for value in values[1:]:
        found = merged(found, value)
    return found
