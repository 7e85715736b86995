"""The edit sites; adding one is adding a module with `ANCHORS`, which is found by being here."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from anchors.kit.anchor import Anchor


@cache
def all_anchors() -> tuple[Anchor, ...]:
    """Every anchor, in the order in which reports show them."""
    found: list[Anchor] = []
    for info in iter_modules(__path__):
        found += import_module(f"{__name__}.{info.name}").ANCHORS
    return tuple(sorted(found, key=lambda anchor: (anchor.order, anchor.id)))
