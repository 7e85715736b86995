"""What a draft loader's name can be: two runs side by side, stock with `bias`, ours with `bias_vl`.

A loader that works loads `<layer>.ffn.gate.bias`. The edit is right where `bias_vl` goes the same
way through it. So both names are followed at once: what stands in front of `.ffn.gate` is unknown
and the same, their ends are known, and a question about a name has two answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

OLD = ".ffn.gate.bias"
NEW = ".ffn.gate.e_score_correction_bias"
VISION = "_vl"


class Unproven(Exception):
    """The loader does something with the name that this cannot follow, or that goes wrong."""


@dataclass(frozen=True)
class Name:
    """The ends of the name in both runs. `mapped`: made by code that is not in this file, so
    comparing it with None or a value says nothing about the end."""

    stock: str
    ours: str
    mapped: bool = False

    @property
    def ends(self) -> tuple[str, str]:
        """Both ends, stock's first."""
        return self.stock, self.ours


@dataclass(frozen=True)
class Truth:
    """A condition in both runs; None: unknown. Both None: unknown, and the same in both."""

    stock: bool | None
    ours: bool | None

    @property
    def is_shared(self) -> bool:
        """Whether both runs take the same branch."""
        return self.stock == self.ours


@dataclass(frozen=True)
class Const:
    """One of these literals."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Kind:
    """Anything else that matters, by its word."""

    word: str


@dataclass(frozen=True)
class Many:
    """A tuple or list, item by item."""

    items: tuple[Value, ...]


@dataclass(frozen=True)
class Stream:
    """What a comprehension yields; all items are like this one."""

    item: Value


SAME = Truth(None, None)
DIFFERS = Kind("differs")  # may depend on the end of the name
UNBOUND = Kind("unbound")  # in one of the two runs
PIECE = Kind("piece")  # of a name that was split
PAIR = Kind("pair")  # a name and its tensor
PARAMETERS = Kind("parameters")
NAMED = Kind("named_parameters")
WEIGHTS = Kind("weights")
NUMBERED = Kind("enumerated weights")
Value = Name | Truth | Const | Kind | Many | Stream

FIRST = Name(OLD, OLD + VISION)
RENAMED = Name(NEW, NEW + VISION)


def is_tied(value: Value) -> bool:
    """Whether a value has to do with the name."""
    if isinstance(value, Truth):
        return not value.is_shared
    if isinstance(value, Many):
        return any(map(is_tied, value.items))
    if isinstance(value, Stream):
        return is_tied(value.item)
    return isinstance(value, Name) or value in (DIFFERS, PIECE, PAIR)


def truth(value: Value) -> Truth | None:
    """The value as a condition; None: it may differ in ways that are not known."""
    if isinstance(value, Truth):
        return value
    if isinstance(value, Const):
        found = {bool(each) for each in value.values}
        return SAME if len(found) != 1 else Truth(*(found.pop(),) * 2)
    if isinstance(value, Name):
        return SAME if value.mapped else Truth(True, True)
    return None if is_tied(value) and value != PIECE else SAME


def merged(one: Value | None, other: Value | None) -> Value | None:
    """What holds after either of two ways; None: not bound on one of them."""
    if one == other:
        return one
    if UNBOUND in (one, other):
        return UNBOUND
    if one is None or other is None:
        bound = one or other
        return DIFFERS if bound is not None and is_tied(bound) else None
    if isinstance(one, Const) and isinstance(other, Const):
        return Const((*one.values, *(v for v in other.values if v not in one.values)))
    if isinstance(one, Name) and isinstance(other, Name) and one.ends == other.ends:
        return Name(*one.ends, mapped=True)
    ends = {each.ends for each in (one, other) if isinstance(each, Name)}
    if ends == {FIRST.ends, RENAMED.ends}:
        return RENAMED  # under the other name stock would not load the bias either
    for first, second in ((one, other), (other, one)):
        if isinstance(first, Name) and not is_tied(second):  # None, say, by a shared condition
            return Name(first.stock, first.ours, mapped=True)
    return DIFFERS if is_tied(one) or is_tied(other) else SAME


def joined(ends: list[dict[str, Value] | None]) -> dict[str, Value] | None:
    """What holds whichever way was taken; None where no way comes here."""
    there = [env for env in ends if env is not None]
    if not there:
        return None
    result = there[0]
    for env in there[1:]:
        both = {name: merged(result.get(name), env.get(name)) for name in {**result, **env}}
        result = {name: value for name, value in both.items() if value is not None}
    return result


def chosen(test: Truth | None, yes: Value | None, no: Value | None) -> Value | None:
    """What a name is after a condition in which the two runs part.

    Stock takes the branch that renames, as it would not load the bias otherwise.
    """
    if yes == no:
        return yes
    if yes in (None, UNBOUND) or no in (None, UNBOUND):
        return UNBOUND
    if not (isinstance(yes, Name) and isinstance(no, Name)):
        raise Unproven("what happens besides the rename depends on the end of the name")
    test = test or SAME
    stock = {n.stock for n, way in ((yes, True), (no, False)) if test.stock in (way, None)}
    ours = {n.ours for n, way in ((yes, True), (no, False)) if test.ours in (way, None)}
    stock = stock & {NEW} or stock
    if len(stock) > 1 or len(ours) > 1:
        raise Unproven("a condition may rename the one and not the other")
    return Name(stock.pop(), ours.pop(), yes.mapped or no.mapped)


def replaced(name: Name, old: Value, new: Value) -> Value:
    """`name.replace(old, new)`; an `old` that is not known is taken to miss the end."""
    if not isinstance(old, Const):
        foreign = isinstance(old, Name) and old.mapped  # a number, most likely
        return name if foreign or not (is_tied(old) or is_tied(new)) else DIFFERS
    for text in old.values:
        if not isinstance(text, str) or text == "":
            return DIFFERS
        inside = text in name.stock or text in name.ours
        if inside and not (len(old.values) == 1 and _is_text(new)):
            return DIFFERS
        if not inside and any(_crosses(text, end, 2) for end in (name.stock, name.ours)):
            return DIFFERS
    text = old.values[0]
    if text not in name.stock and text not in name.ours:
        return name
    fresh = new.values[0] if isinstance(new, Const) else ""
    return Name(name.stock.replace(text, fresh), name.ours.replace(text, fresh), name.mapped)


def cut(name: Name, suffix: Value) -> Value:
    """`name.removesuffix(suffix)`."""
    if not _is_text(suffix) or not isinstance(suffix, Const):
        return DIFFERS
    text = suffix.values[0]
    if any(len(text) >= len(end) for end in (name.stock, name.ours)):
        return DIFFERS
    return Name(name.stock.removesuffix(text), name.ours.removesuffix(text), name.mapped)


def extended(name: Name, more: Value) -> Value:
    """`name + more`."""
    if not _is_text(more) or not isinstance(more, Const):
        return DIFFERS
    return Name(name.stock + more.values[0], name.ours + more.values[0], name.mapped)


def ends_with(name: Name, suffix: Value) -> Value:
    """`name.endswith(suffix)`, a text or several."""
    return _each(suffix, name, lambda end, text: _ends(end, text))


def starts_with(name: Name, prefix: Value) -> Value:
    """`name.startswith(prefix)`; the beginning is not known, and the same."""
    if not isinstance(prefix, Const):
        return DIFFERS if is_tied(prefix) else SAME
    return DIFFERS if "gate" in repr(prefix.values) or "bias" in repr(prefix.values) else SAME


def contains(name: Name, part: Value) -> Value:
    """`part in name`; a part that is not known is taken to miss the end."""
    if not isinstance(part, Const):
        return DIFFERS if is_tied(part) else SAME
    return _each(part, name, lambda end, text: True if text in end else None, inside=True)


def equals(name: Name, other: Value) -> Value:
    """`name == other`, or `name in other` for literals."""
    if not isinstance(other, Const):
        return SAME if name.mapped and not is_tied(other) and other != PARAMETERS else DIFFERS
    if all(value is None for value in other.values):
        return SAME if name.mapped else Truth(False, False)
    return _each(other, name, lambda end, text: None if text.endswith(end) else False)


def piece_equals(other: Value) -> Value:
    """A piece of the name compared with literals: which run it is does not show without `bias`."""
    if isinstance(other, Const) and "bias" not in repr(other.values):
        return SAME
    return DIFFERS


def _is_text(value: Value) -> bool:
    return isinstance(value, Const) and len(value.values) == 1 and isinstance(value.values[0], str)


def _ends(end: str, text: str) -> bool | None:
    if len(text) <= len(end):
        return end.endswith(text)
    return None if text.endswith(end) else False


def _crosses(text: str, end: str, least: int) -> bool:
    """Whether `text` can begin in the unknown part and reach `least` characters into `end`."""
    longest = min(len(text) - 1, len(end))
    return any(text.endswith(end[:k]) for k in range(least, longest + 1))


def _each(given: Value, name: Name, ask: Any, *, inside: bool = False) -> Value:
    """One answer for literals of which one is meant, or all (a container): all the same, or
    `any` of a container."""
    if not isinstance(given, Const):
        return DIFFERS
    answers = []
    for value in given.values:
        found = [_any(value, end, ask) for end in (name.stock, name.ours)]
        if inside and found == [None, None] and _tells(value, name):
            return DIFFERS
        answers.append(Truth(*found))
    if len(set(answers)) == 1:
        return answers[0]
    return SAME if all(answer.is_shared for answer in answers) else DIFFERS


def _any(value: Any, end: str, ask: Any) -> bool | None:
    if isinstance(value, str):
        return ask(end, value)
    if not isinstance(value, (tuple, list, set, frozenset, dict)):
        return False
    found = [ask(end, each) for each in value if isinstance(each, str)]
    return True if True in found else None if None in found else False


def _tells(text: Any, name: Name) -> bool:
    """Whether a part that lies in neither end could still lie in one name only."""
    common = 0
    for one, other in zip(name.stock, name.ours, strict=False):
        if one != other:
            break
        common += 1
    if not isinstance(text, str):
        return True
    return any(_crosses(text, end, common + 1) for end in (name.stock, name.ours))
