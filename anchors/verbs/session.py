"""A writing run: signals held, lock held, what an earlier run left behind dealt with."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from anchors.engine import staging
from anchors.engine.target import Target
from anchors.errors import ROLLED_BACK, HotfixError
from anchors.writing import journal, state
from anchors.writing.effects import Effects
from anchors.writing.lock import folder_locked, locked
from anchors.writing.transaction import explained, signals_held


class Session:
    """One writing run, which holds the lock: what it writes goes through `effects`; `notes` are
    for the person, `made` the folders its locks had to make."""

    def __init__(self, effects: Effects, stack: ExitStack) -> None:
        self.effects = effects
        self.notes: list[str] = []
        self.made: tuple[str, ...] = ()
        self._stack = stack
        self._held: set[str] = set()

    def hold(self, roots: Iterable[str]) -> None:
        """Holds overlay roots to the end of the run; other trees may share them.

        What keeps a root from being locked is a note: where it cannot be written either, the
        preflight that follows refuses with better words.
        Raises HotfixError (exit 6) where another run does not let go.
        """
        for root in sorted({os.path.realpath(root) for root in roots} - self._held):
            self._held.add(root)
            try:
                self.made += self._stack.enter_context(folder_locked(root, self.effects))
            except OSError as error:
                self.notes.append(
                    f"{root} cannot be locked ({error.strerror or error}): let no two runs on "
                    "vLLMs that share it happen at once"
                )


@contextmanager
def open_session(target: Target, effects: Effects) -> Iterator[Session]:
    """Holds the tree for one run, in which an interrupted run is undone first.

    Raises HotfixError: another run holds the tree (6), its journal cannot be undone (5).
    """
    with signals_held(effects):
        try:
            with locked(state.lock_path(target.root), effects), ExitStack() as stack:
                session = Session(effects, stack)
                session.notes += _recover(target.root, session)
                yield session
        except Exception as error:
            raise explained(error, target.root) from error


def _recover(vllm_root: str, session: Session) -> list[str]:
    """Finishes or rolls back what a crashed run left; notes for the person.

    Raises HotfixError: not all could be put back (5), or not all cleared away (4).
    """
    opened = journal.load(vllm_root)
    if opened is None:
        return []
    session.hold(filter(os.path.isdir, (os.path.dirname(tree.final) for tree in opened.trees)))
    if opened.phase == journal.COMMITTED:
        journal.finish(opened, vllm_root, session.effects)
        return ["an earlier run was interrupted after its work was done"]
    adopted = frozenset(
        path
        for tree in opened.trees
        for path in staging.adopted(os.path.dirname(tree.final), vllm_root)
    )
    undone = journal.roll_back(opened, vllm_root, session.effects, adopted=adopted)
    if undone.left:
        raise HotfixError(
            "cannot-clear-away",
            "an interrupted run was rolled back, and this vLLM is as it was before that; but not "
            "all that it left can be cleared away, so this run did nothing.",
            exit_code=ROLLED_BACK,
            context=undone.left,
            hint="remove the cause, then run this again",
            state="interrupted",
        )
    return [
        "rolled back an interrupted run first",
        *(f"{path} was written by somebody else since; left as it is" for path in undone.kept),
    ]
