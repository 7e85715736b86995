"""What is said of a draft loader, and what really happens when it is patched and run.

A loader's worth is not derived from its parts: it is run, with a checkpoint that has `bias`, one
that has `bias_vl` too, and one whose `bias_vl` has no parameter.
"""

from __future__ import annotations

from collections.abc import Callable

import libcst as cst

from anchors.engine import fences
from anchors.kit import rename
from anchors.kit.anchor import Drift, Match, Values
from anchors.kit.draft_names import NEW, OLD, Unproven

_GATE = "mtp.0"
_VALUES = Values("/overlay", "0" * 64, "1" * 64)


class Parameter:
    """What a loader fills."""

    def __init__(self) -> None:
        self.value: str | None = None

    def load(self, value: str) -> None:
        self.value = value


def verdict(source: str) -> Match | None:
    """Where the edit goes; None for a loader that is refused."""
    try:
        return rename.locate(cst.parse_module(source))
    except Drift:
        return None


def candidates(source: str) -> list[Match]:
    """The edits that could have been made where nothing is proven."""
    try:
        _, name, (line, indent) = rename.spot(rename.find(cst.parse_module(source)))
    except (Unproven, Drift):
        return []
    return [
        Match(line, indent, (("name", name), ("params", params))) for params in ("", "params_dict")
    ]


def patched(source: str, match: Match) -> str:
    """The module with the edit, fences included."""
    block = fences.render("mtp-bias-vl", rename.render(match, _VALUES), match.indent)
    return fences.insert(source.encode(), [(match.line, block)]).decode()


def works(source: str) -> bool:
    """Whether the loader gives every weight its parameter, and a `bias_vl` without one an error."""
    return all(check(source) for check in (_text_only, _vision, _homeless))


def loads_stock(source: str) -> bool:
    """Whether the loader as it is loads a text-only checkpoint."""
    return _text_only(source)


def _text_only(source: str) -> bool:
    return _loaded(source, ("bias",), ("bias",)) == {"bias": "bias", "weight": "weight"}


def _vision(source: str) -> bool:
    wanted = {each: each for each in ("bias", "bias_vl", "weight")}
    both = ("bias", "bias_vl")
    return all(_loaded(source, order, both) == wanted for order in (both, both[::-1]))


def _homeless(source: str) -> bool:
    return _loaded(source, ("bias", "bias_vl"), ("bias",)) is KeyError


def _loaded(
    source: str, checkpoint: tuple[str, ...], model: tuple[str, ...]
) -> dict[str, str | None] | type[Exception]:
    """What the model's parameters hold, by the checkpoint's names, or the error that ended it."""
    space: dict[str, Callable[[dict[str, Parameter]], object]] = {}
    exec(compile(source, "loader", "exec"), space)
    homes: dict[str, list[Parameter]] = {}
    parameters: dict[str, Parameter] = {}
    for layer in ("mtp.0", "model.layers.3"):  # a loader may take the names as they are
        for name in (*model, "weight"):
            home = f"{layer}.ffn.gate.{name}".replace(OLD, NEW)
            parameters[home] = Parameter()
            homes.setdefault(name, []).append(parameters[home])
    weights = [(f"{_GATE}.ffn.gate.{name}", name) for name in (*checkpoint, "weight")]
    try:
        draft = space["Draft"](parameters)
        draft.load_weights(iter(weights))  # type: ignore[attr-defined]
    except Exception as error:  # noqa: BLE001 (whatever a loader ends with is its result)
        return type(error)
    return {
        name: next((each.value for each in places if each.value), None)
        for name, places in homes.items()
    }
