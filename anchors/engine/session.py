"""A writing run: signals held, lock held, what an earlier run left behind dealt with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from anchors.engine import journal
from anchors.engine.effects import Effects
from anchors.engine.lock import locked
from anchors.engine.target import Target
from anchors.engine.transaction import explained, signals_held


@contextmanager
def writing(target: Target, effects: Effects) -> Iterator[list[str]]:
    """Holds the tree for one run; yields notes about an interrupted run that was undone first.

    Raises HotfixError: another run holds the tree (6), its journal cannot be undone (5).
    """
    state = os.path.join(target.root, journal.STATE_FOLDER, "lock")
    notes: list[str] = []
    with signals_held(effects):
        try:
            with locked(state, effects):
                notes += recover(target.root, effects)
                yield notes
        except Exception as error:
            raise explained(error) from error


def recover(root: str, effects: Effects) -> list[str]:
    """Finishes or rolls back what a crashed run left; notes for the person."""
    opened = journal.load(root)
    if opened is None:
        return []
    if opened.phase == journal.COMMITTED:
        journal.finish(opened, root, effects)
        return ["an earlier run was interrupted after its work was done"]
    left = journal.roll_back(opened, root, effects)
    return [
        "rolled back an interrupted run first",
        *(f"{path} was written by somebody else since; left as it is" for path in left),
    ]
