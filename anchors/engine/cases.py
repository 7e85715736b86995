"""Runs one anchor over one piece of source; the cases in the sites are checked by this."""

from __future__ import annotations

from anchors.engine import fences
from anchors.engine.locate import locate
from anchors.kit.anchor import (
    APPLIES,
    MIXED,
    NOT_APPLICABLE,
    Anchor,
    Drift,
    NotApplicable,
    Values,
)

_SAMPLE = Values(root="/overlay", overlay="0" * 64, plan="1" * 64)


def run(anchor: Anchor, source: str) -> tuple[str, str]:
    """(outcome, patched source). The source is unchanged unless the outcome is `applies`."""
    data = source.encode()
    parted = fences.split(data)
    if parted.broken:
        return MIXED, source
    ((_, outcome),) = locate(anchor.file, parted.stock, (anchor,)).outcomes
    if isinstance(outcome, Drift):
        return outcome.kind, source
    if isinstance(outcome, NotApplicable) or anchor.render is None:
        return NOT_APPLICABLE, source
    body = anchor.render(outcome, _SAMPLE)
    block = fences.render(anchor.id, body, outcome.indent)
    return APPLIES, fences.insert(parted.stock, [(outcome.line, block)]).decode()
