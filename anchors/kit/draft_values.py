"""What an expression of a draft loader is, for both names at once."""

from __future__ import annotations

import ast
from typing import Any

from anchors.kit.draft_calls import (
    Env,
    both,
    builtin,
    compared,
    constants,
    element,
    foreign,
    items,
    literal,
    negated,
    of_literal,
    of_text,
    searched,
    sliced,
    summed,
)
from anchors.kit.draft_names import (
    DIFFERS,
    FIRST,
    NAMED,
    NEW,
    NUMBERED,
    PAIR,
    PARAMETERS,
    PIECE,
    RENAMED,
    SAME,
    UNBOUND,
    WEIGHTS,
    Const,
    Many,
    Name,
    Stream,
    Truth,
    Unproven,
    Value,
    chosen,
    is_tied,
    merged,
    truth,
)

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)


class Expressions:
    """Evaluates; `looked_up`: a parameter was found by both new names. `is_checked`: the edit
    raises for a name without a parameter. `trying`: how many `try` we are in."""

    def __init__(self, tree: ast.Module) -> None:
        self.looked_up = False
        self.is_checked = False
        self.trying = 0
        self._constants = constants(tree)

    def call(self, node: ast.Call, obj: Value | None, given: list[Value], env: Env) -> Value | None:
        """What a function of this file returns; None for others."""
        raise NotImplementedError

    def bind(self, target: ast.expr, value: Value, env: Env) -> None:
        """Assigns."""
        if isinstance(target, ast.Name):
            env[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            for part, item in zip(target.elts, items(value, len(target.elts)), strict=True):
                self.bind(part, item, env)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, DIFFERS if is_tied(value) else SAME, env)
        elif isinstance(target, (ast.Subscript, ast.Attribute)):
            self.value(target.value, env)

    def value(self, node: ast.expr, env: Env) -> Value:
        """Raises Unproven for what cannot be followed."""
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if isinstance(node, _COMPREHENSIONS):
            return self._comprehension(node, env)
        if method is not None:
            found: Value = method(node, env)
            return found
        if isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await)):
            raise Unproven(f"line {node.lineno}: it is a generator, or waits")
        parts = [self.value(n, env) for n in ast.iter_child_nodes(node) if isinstance(n, ast.expr)]
        return DIFFERS if any(map(is_tied, parts)) else SAME

    def _constant(self, node: ast.Constant, env: Env) -> Value:
        return Const((node.value,))

    def _name(self, node: ast.Name, env: Env) -> Value:
        value = env[node.id] if node.id in env else self._constants.get(node.id, SAME)
        if value == UNBOUND:
            raise Unproven(f"line {node.lineno}: {node.id} is set for one of the two names only")
        return value

    def _namedexpr(self, node: ast.NamedExpr, env: Env) -> Value:
        value = self.value(node.value, env)
        self.bind(node.target, value, env)
        return value

    def _starred(self, node: ast.Starred, env: Env) -> Value:
        return DIFFERS if is_tied(self.value(node.value, env)) else SAME

    def _lambda(self, node: ast.Lambda, env: Env) -> Value:
        inner = {**env, **dict.fromkeys((a.arg for a in node.args.args), FIRST)}
        return DIFFERS if is_tied(self.value(node.body, inner)) else SAME

    def _tuple(self, node: ast.Tuple | ast.List | ast.Set, env: Env) -> Value:
        items = tuple(self.value(item, env) for item in node.elts)
        if all(isinstance(item, Const) and len(item.values) == 1 for item in items):
            return Const((tuple(item.values[0] for item in items if isinstance(item, Const)),))
        return Many(items)

    _list = _set = _tuple

    def _dict(self, node: ast.Dict, env: Env) -> Value:
        known = literal(node)
        if known is not None:
            return known
        parts = [self.value(n, env) for n in (*node.keys, *node.values) if n is not None]
        return DIFFERS if any(map(is_tied, parts)) else SAME

    def _joinedstr(self, node: ast.JoinedStr, env: Env) -> Value:
        result: Value = Const(("",))
        for part in node.values:
            plain = isinstance(part, ast.FormattedValue) and (
                part.format_spec or part.conversion > 0
            )
            inner = part.value if isinstance(part, ast.FormattedValue) else part
            value = self.value(inner, env)
            result = summed(result, DIFFERS if plain and is_tied(value) else value)
        return result

    def _binop(self, node: ast.BinOp, env: Env) -> Value:
        left, right = self.value(node.left, env), self.value(node.right, env)
        if isinstance(node.op, ast.Add):
            return summed(left, right)
        return DIFFERS if is_tied(left) or is_tied(right) else SAME

    def _unaryop(self, node: ast.UnaryOp, env: Env) -> Value:
        value = self.value(node.operand, env)
        if not isinstance(node.op, ast.Not):
            return literal(node) or (DIFFERS if is_tied(value) else SAME)
        return negated(truth(value))

    def _boolop(self, node: ast.BoolOp, env: Env) -> Value:
        """Left to right, until both runs are sure."""
        stop = isinstance(node.op, ast.Or)
        sides: list[bool | None] = [not stop, not stop]
        parts = False
        for operand in node.values:
            value = self.value(operand, env)
            test = truth(value)
            parts |= test is None or not test.is_shared
            answers = (test.stock, test.ours) if test else (None, None)
            sides = [both(a, b, stop) for a, b in zip(sides, answers, strict=True)]
            if sides == [stop, stop]:
                break
        if parts and sides == [None, None]:
            return DIFFERS
        return Truth(*sides)

    def _ifexp(self, node: ast.IfExp, env: Env) -> Value:
        test = truth(self.value(node.test, env))
        if test is not None and test.is_shared and test.stock is not None:
            return self.value(node.body if test.stock else node.orelse, env)
        yes, no = self.value(node.body, env), self.value(node.orelse, env)
        if test is not None and test.is_shared:
            return merged(yes, no) or SAME
        return chosen(test, yes, no) or SAME

    def _compare(self, node: ast.Compare, env: Env) -> Value:
        left = self.value(node.left, env)
        rest = [self.value(other, env) for other in node.comparators]
        if len(rest) > 1:
            return DIFFERS if any(map(is_tied, (left, *rest))) else SAME
        (op,), (right,) = node.ops, rest
        found = self._compared(op, left, right)
        if isinstance(op, (ast.NotIn, ast.NotEq, ast.IsNot)):
            return negated(truth(found))
        return found

    def _compared(self, op: ast.cmpop, left: Value, right: Value) -> Value:
        is_in = isinstance(op, (ast.In, ast.NotIn))
        if is_in and right == PARAMETERS:
            return self._has_parameter(left)
        return compared(op, left, right)

    def _has_parameter(self, name: Value) -> Value:
        """The model has the new names, the edit sees to that; and none of the old ones."""
        if name == SAME or isinstance(name, Const):
            return SAME
        if not isinstance(name, Name):
            return DIFFERS
        if name.ends == FIRST.ends:
            return Truth(False, False)
        if name.ends == RENAMED.ends and self.is_checked:
            return Truth(True, True)
        return DIFFERS

    def _look_up(self, name: Value, line: int) -> None:
        if not isinstance(name, Name) or name.stock != NEW:
            return
        if name.ours != RENAMED.ours:
            raise Unproven(f"line {line} looks a parameter up by a name that was not renamed")
        if self.trying and not self.is_checked:
            raise Unproven(f"line {line} looks a parameter up where an error may be swallowed")
        self.looked_up = True

    def _subscript(self, node: ast.Subscript, env: Env) -> Value:
        base = self.value(node.value, env)
        if isinstance(node.slice, ast.Slice):
            lower = node.slice.lower and self.value(node.slice.lower, env)
            whole = lower is not None and node.slice.upper is None and node.slice.step is None
            return sliced(base, lower or SAME, is_open=whole)
        key = self.value(node.slice, env)
        if base == PARAMETERS:
            self._look_up(key, node.lineno)
            return SAME
        if base == PIECE and not is_tied(key):
            return PIECE
        at = key.values[0] if isinstance(key, Const) and len(key.values) == 1 else None
        if base == PAIR:
            return FIRST if at == 0 else SAME if at == 1 else DIFFERS
        if (
            isinstance(base, Many)
            and isinstance(at, int)
            and -len(base.items) <= at < len(base.items)
        ):
            return base.items[at]
        return DIFFERS if is_tied(base) or is_tied(key) else SAME

    def _attribute(self, node: ast.Attribute, env: Env) -> Value:
        base = self.value(node.value, env)
        known = self._constants.get(f".{node.attr}") if isinstance(node.value, ast.Name) else None
        if isinstance(base, Name) and base.mapped:
            return SAME
        return DIFFERS if is_tied(base) else known or SAME

    def _comprehension(self, node: Any, env: Env) -> Value:
        inner = dict(env)
        parts = False
        for generator in node.generators:
            source = self.value(generator.iter, inner)
            if source in (WEIGHTS, NUMBERED):
                raise Unproven(f"line {node.lineno} takes the weights in a comprehension")
            self.bind(generator.target, element(source), inner)
            for test in generator.ifs:
                found = truth(self.value(test, inner))
                parts |= found is None or not found.is_shared
        values = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        items = [self.value(value, inner) for value in values]
        return DIFFERS if parts or len(items) > 1 and any(map(is_tied, items)) else Stream(items[0])

    def _call(self, node: ast.Call, env: Env) -> Value:
        given = [self.value(a, env) for a in node.args]
        given += [self.value(k.value, env) for k in node.keywords]
        function = node.func
        obj = self.value(function.value, env) if isinstance(function, ast.Attribute) else None
        found = self.call(node, obj, given, env)
        if found is not None:
            return found
        if isinstance(function, ast.Attribute):
            found = self._method(node, function.attr, obj or SAME, given)
        elif isinstance(function, ast.Name) and function.id not in env:
            found = builtin(function.id, given)
        return foreign(given, obj) if found is None else found

    def _method(self, node: ast.Call, attr: str, obj: Value, given: list[Value]) -> Value | None:
        first = given[0] if given else None
        if isinstance(obj, Name):
            return of_text(obj, attr, given)
        if obj == PARAMETERS:
            if attr in ("pop", "popitem", "clear"):
                raise Unproven(f"line {node.lineno} takes parameters out")
            if attr == "get" and first is not None:
                test = truth(self._has_parameter(first))
                if test == Truth(True, True):
                    self._look_up(first, node.lineno)
                    return SAME
                return DIFFERS if is_tied(first) else SAME
            return SAME
        if attr == "named_parameters":
            return NAMED
        if obj == PIECE:
            return SAME if attr in ("isdigit", "isnumeric", "isdecimal") else DIFFERS
        if isinstance(obj, Const) and len(obj.values) == 1:
            return of_literal(obj.values[0], attr, given)
        if attr in ("match", "search", "fullmatch", "sub", "findall"):
            return searched(attr, given, self._constants, node.func)
        return None
