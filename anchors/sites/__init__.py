"""The edit sites, one module each; adding a site is adding a file with an `ANCHOR`."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from anchors.kit.anchor import Anchor

_ORDER = (
    "config-hook",
    "model-hook",
    "dspark-bias-vl",
    "dspark-hook",
    "mtp-bias-vl",
    "mtp-hook",
    "message-rules",
)


@cache
def all_anchors() -> tuple[Anchor, ...]:
    """Every anchor, in the order reports show them; new ones come last by id."""
    found: list[Anchor] = []
    for info in iter_modules(__path__):
        found += getattr(import_module(f"{__name__}.{info.name}"), "ANCHORS", ())
    rank = {anchor_id: place for place, anchor_id in enumerate(_ORDER)}
    return tuple(sorted(found, key=lambda anchor: (rank.get(anchor.id, len(rank)), anchor.id)))
