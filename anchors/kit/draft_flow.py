"""Whether an edit in a draft loader gives `bias_vl` the way that `bias` goes.

Nothing is run: the loader's statements are followed for both names at once (`draft_names`), from
the loop over the weights to the parameter that is looked up. Refused is what parts the two, or
what cannot be followed. Code outside the file (`get_spec_layer_idx_from_weight_name`) is taken to
treat a routing bias as any other weight.
"""

from __future__ import annotations

import ast

from anchors.kit.draft_calls import Env, element, is_quiet, one_of, returns
from anchors.kit.draft_names import (
    DIFFERS,
    FIRST,
    NUMBERED,
    PARAMETERS,
    RENAMED,
    SAME,
    WEIGHTS,
    Name,
    Truth,
    Unproven,
    Value,
    chosen,
    is_tied,
    joined,
    truth,
)
from anchors.kit.draft_values import Expressions

_DEEPEST = 8


class Flow(Expressions):
    """Follows `method` of `owner`; in front of `statement` an edit renames the variable `name`."""

    def __init__(
        self, tree: ast.Module, owner: ast.ClassDef, statement: ast.stmt, name: str
    ) -> None:
        super().__init__(tree)
        self._functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
        self._methods = {n.name: n for n in owner.body if isinstance(n, ast.FunctionDef)}
        self._owner = owner.name
        self._statement = statement
        self._name_ = name
        self._stack: list[ast.AST] = []
        self._nested: dict[str, ast.FunctionDef | ast.Lambda] = {}
        self._outer: Env = {}
        self._loops: list[tuple[list[Env], list[Env]]] = []
        self._returns: list[Value] = []
        self._rest: list[ast.stmt] = []
        self.parameters: set[str] = set()

    def follow(self, method: ast.FunctionDef) -> str:
        """The variable that holds the parameters at the edit, "" where none does.

        Raises Unproven, with the reason.
        """
        arguments = [a.arg for a in method.args.args]
        env: Env = dict.fromkeys(arguments, SAME)
        for name in arguments[1:2]:
            env[name] = WEIGHTS
        self._called(method, env)
        if not self.parameters:
            raise Unproven("the loader does not come to the rename with that name")
        if not self.looked_up:
            raise Unproven("no parameter is looked up by the new name afterwards")
        if len(self.parameters) > 1:
            raise Unproven("the parameters are in different variables")
        return next(iter(self.parameters))

    def _called(self, function: ast.FunctionDef | ast.Lambda, env: Env) -> Value:
        if function in self._stack or len(self._stack) > _DEEPEST:
            raise Unproven(f"line {function.lineno} calls itself")
        if isinstance(function, ast.Lambda):
            return self.value(function.body, env)
        if any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in ast.walk(function)):
            raise Unproven(f"line {function.lineno}: {function.name} is a generator")
        kept = self._loops, self._returns
        self._loops, self._returns = [], []
        self._stack.append(function)
        try:
            if self._block(function.body, env) is not None:
                self._returns.append(SAME)
            return one_of(self._returns) or SAME
        finally:
            self._stack.pop()
            self._loops, self._returns = kept

    def call(self, node: ast.Call, obj: Value | None, given: list[Value], env: Env) -> Value | None:
        target, bound = self._target(node.func, env)
        if target is None:
            return None
        is_nested = target in self._nested.values()
        if not is_nested and not any(is_tied(v) or v in (WEIGHTS, NUMBERED) for v in given):
            return SAME
        names = [a.arg for a in (*target.args.posonlyargs, *target.args.args)]
        names = names[1:] if bound else names
        keywords = [k.arg for k in node.keywords]
        plain = not any(isinstance(a, ast.Starred) for a in node.args) and None not in keywords
        if not plain or len(node.args) > len(names):
            raise Unproven(f"line {node.lineno} calls with arguments that cannot be followed")
        inner: Env = dict(zip((*names[: len(node.args)], *map(str, keywords)), given, strict=True))
        every = [*names, *(a.arg for a in target.args.kwonlyargs)]
        inner = {**dict.fromkeys(every, SAME), **inner}
        kept, self._outer = self._outer, {**self._outer, **env} if is_nested else {}
        try:
            return self._called(target, inner)
        finally:
            self._outer = kept

    def _target(
        self, function: ast.expr, env: Env
    ) -> tuple[ast.FunctionDef | ast.Lambda | None, bool]:
        if isinstance(function, ast.Name):
            nested = self._nested.get(function.id)
            return nested or (
                None if function.id in env else self._functions.get(function.id)
            ), False
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            method = self._methods.get(function.attr)
            if method and function.value.id in ("self", "cls", self._owner):
                marks = {ast.unparse(d) for d in method.decorator_list}
                if marks - {"staticmethod", "classmethod", "torch.no_grad()"}:
                    raise Unproven(f"line {method.lineno}: {method.name} is decorated")
                plain = function.value.id == self._owner and "classmethod" not in marks
                return method, not (plain or "staticmethod" in marks)
        return None, False

    def _name(self, node: ast.Name, env: Env) -> Value:
        if node.id not in env and node.id in self._outer:
            return self._outer[node.id]
        return super()._name(node, env)

    def _block(self, body: list[ast.stmt], env: Env) -> Env | None:
        """What holds after `body`; None where it is always left early."""
        now: Env | None = env
        outermost = isinstance(self._stack[-1], ast.FunctionDef) and body is self._stack[-1].body
        for index, statement in enumerate(body):
            if now is None:
                return None
            self._rest = body[index + 1 :] if outermost else []
            if statement is self._statement:
                now = self._edited(now)
            now = self._one(statement, now)
        return now

    def _edited(self, env: Env) -> Env:
        value = env.get(self._name_)
        if not isinstance(value, Name) or value.ends != FIRST.ends:
            raise Unproven(
                f"line {self._statement.lineno}: {self._name_} is not the weight's name there on "
                "every path"
            )
        if self.trying:
            raise Unproven(f"line {self._statement.lineno} stands where an error may be swallowed")
        places = [n for n, v in {**self._outer, **env}.items() if v == PARAMETERS]
        self.parameters.add(places[0] if places else "")
        self.is_checked = bool(places)
        return {**env, self._name_: Name(value.stock, RENAMED.ours, value.mapped)}

    def _one(self, statement: ast.stmt, env: Env) -> Env | None:
        if isinstance(statement, ast.If):
            return self._if(statement, env)
        if isinstance(statement, (ast.For, ast.While)):
            return self._loop(statement, env)
        if isinstance(statement, ast.Try):
            return self._try(statement, env)
        if isinstance(statement, ast.With):
            for item in statement.items:
                value = self.value(item.context_expr, env)
                if "suppress" in ast.unparse(item.context_expr):
                    raise Unproven(f"line {statement.lineno} swallows errors")
                if item.optional_vars:
                    self.bind(item.optional_vars, value, env)
            return self._block(statement.body, env)
        if isinstance(statement, (ast.Break, ast.Continue)):
            self._loops[-1][isinstance(statement, ast.Continue)].append(env)
            return None
        if isinstance(statement, ast.Return):
            self._returns.append(self.value(statement.value, env) if statement.value else SAME)
            return None
        if isinstance(statement, ast.Raise):
            return None
        self._simple(statement, env)
        return env

    def _simple(self, statement: ast.stmt, env: Env) -> None:
        """Statements that always go on; changes `env`."""
        if isinstance(statement, ast.FunctionDef):
            self._nested[statement.name] = statement
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            if statement.value is None:
                return
            value = self.value(statement.value, env)
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                if isinstance(statement.value, ast.Lambda) and isinstance(target, ast.Name):
                    self._nested[target.id] = statement.value
                elif isinstance(target, ast.Name):
                    self._nested.pop(target.id, None)
                self.bind(target, value, env)
        elif isinstance(statement, ast.AugAssign):
            left = ast.copy_location(
                ast.parse(ast.unparse(statement.target), mode="eval").body, statement
            )
            sum_ = ast.copy_location(ast.BinOp(left, statement.op, statement.value), statement)
            self.bind(statement.target, self.value(sum_, env), env)
        elif isinstance(statement, ast.Expr):
            self.value(statement.value, env)
        elif isinstance(statement, ast.Assert):
            self._shared(statement.test, env)
        elif not isinstance(statement, (ast.Pass, ast.Import, ast.ImportFrom)):
            raise Unproven(f"line {statement.lineno}: {type(statement).__name__} is not followed")

    def _shared(self, test: ast.expr, env: Env) -> Truth:
        found = truth(self.value(test, env))
        if found is None or not found.is_shared:
            raise Unproven(f"line {test.lineno} tells the two names apart")
        return found

    def _if(self, statement: ast.If, env: Env) -> Env | None:
        rest = self._rest if returns([statement]) else []  # what the test calls has its own
        test = truth(self.value(statement.test, env))
        if test is None or not test.is_shared:
            return self._parted(statement, rest, test, env)
        if test.stock is not None:
            return self._block(statement.body if test.stock else statement.orelse, env)
        return joined(
            [self._block(statement.body, dict(env)), self._block(statement.orelse, dict(env))]
        )

    def _parted(
        self, statement: ast.If, rest: list[ast.stmt], test: Truth | None, env: Env
    ) -> Env | None:
        """The two runs may part for the rename alone, up to the end of a helper that returns it."""
        if not is_quiet([statement, *rest], statement, self._statement):
            raise Unproven(f"line {statement.lineno} tells the two names apart")
        looked_up, before = self.looked_up, self._returns
        ends, values = [], []
        for branch in (statement.body, statement.orelse):
            self._returns = []
            ends.append(self._block([*branch, *rest], dict(env)))
            values.append(one_of(self._returns))
        self.looked_up, self._returns = looked_up, before
        yes, no = ends
        try:
            if yes is None and no is None:
                before.append(chosen(test, *values) or SAME)
                return None
            if yes is None or no is None or any(values):
                raise Unproven("the one name returns")
            found = {n: chosen(test, yes.get(n), no.get(n)) for n in {**yes, **no}}
        except Unproven as error:
            raise Unproven(f"line {statement.lineno}: {error}") from error
        return {name: value for name, value in found.items() if value is not None}

    def _loop(self, statement: ast.For | ast.While, env: Env) -> Env | None:
        """Twice: what the first round leaves behind is there in the second."""
        start: Env | None = env
        for is_first in (True, False):
            kept = self.looked_up, set(self.parameters)
            self._loops.append(([], []))
            try:
                again = dict(start or {})
                if isinstance(statement, ast.For):
                    item = element(self.value(statement.iter, again))
                    if item == DIFFERS:
                        raise Unproven(
                            f"line {statement.lineno} loops over what cannot be followed"
                        )
                    self.bind(statement.target, item, again)
                else:
                    self._shared(statement.test, again)
                end = self._block(statement.body, again)
            finally:
                breaks, continues = self._loops.pop()
            start = joined([start, end, *continues])
            if is_first:
                self.looked_up, self.parameters = kept
        endless = isinstance(statement, ast.While) and ast.unparse(statement.test) in ("True", "1")
        done = None if endless else self._block(statement.orelse, dict(start or {}))
        return joined([done, *breaks])

    def _try(self, statement: ast.Try, env: Env) -> Env | None:
        self.trying += bool(statement.handlers)
        body = self._block(statement.body, dict(env))
        self.trying -= bool(statement.handlers)
        between = joined([dict(env), body]) or env
        ends = [self._block(statement.orelse, body) if body is not None else None]
        for handler in statement.handlers:
            inner = {**between, **({handler.name: SAME} if handler.name else {})}
            ends.append(self._block(handler.body, inner))
        end = joined(ends)
        if statement.finalbody:
            last = self._block(statement.finalbody, dict(end or between))
            return last if end is not None else None
        return end
