"""What a transaction is about to do, written down so that any crash can be undone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace

from anchors.digests import read_file, sha256
from anchors.errors import BROKEN, HotfixError
from anchors.writing import state
from anchors.writing.effects import PART, Effects

SCHEMA = 1
WRITING = "writing"
COMMITTED = "committed"


@dataclass(frozen=True)
class FileEntry:
    """One file: digests before and after (None: no file), where its old bytes are kept."""

    path: str
    before: str | None
    after: str | None
    undo: str | None
    temp: str
    mode: int
    uid: int
    gid: int


@dataclass(frozen=True)
class TreeEntry:
    """The overlay folder `final`: a new one waits at `new`, the former moves to `old`."""

    final: str
    new: str
    old: str
    had: bool
    remove: bool


@dataclass(frozen=True)
class Journal:
    """All of a transaction. `folders` are made on the way in, `empty` taken away at the end."""

    phase: str
    files: tuple[FileEntry, ...]
    trees: tuple[TreeEntry, ...]
    folders: tuple[str, ...]
    empty: tuple[str, ...]


def save(journal: Journal, vllm_root: str, effects: Effects) -> None:
    """Puts the journal on disk in one step."""
    path = state.journal_path(vllm_root)
    data = json.dumps({"schema": SCHEMA, **asdict(journal)}, indent=1).encode()
    effects.write(f"{path}.tmp", data)
    effects.rename(f"{path}.tmp", path)


def load(vllm_root: str) -> Journal | None:
    """The open transaction of the vLLM, None without one; HotfixError (exit 5) if unreadable."""
    path = state.journal_path(vllm_root)
    try:
        with open(path, "rb") as file:
            data = json.loads(file.read())
        if data.pop("schema") != SCHEMA:
            raise ValueError("written by another version")
        return Journal(
            phase=data["phase"],
            files=tuple(FileEntry(**entry) for entry in data["files"]),
            trees=tuple(TreeEntry(**entry) for entry in data["trees"]),
            folders=tuple(data["folders"]),
            empty=tuple(data["empty"]),
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HotfixError(
            "journal-corrupt",
            f"an earlier run was interrupted and its journal cannot be read ({error}): what it "
            "left cannot be rolled back. This run changed nothing.",
            exit_code=BROKEN,
            context=(path, f"old bytes: {state.undo_folder(vllm_root)}"),
            hint=f"reinstall vLLM and remove {state.folder(vllm_root)}, or do so by hand",
            state="interrupted",
        ) from error


@dataclass(frozen=True)
class Undone:
    """A transaction rolled back: `kept` are paths that somebody else has written since and that
    stay, `left` what could not be cleared away, though all old bytes are in their places."""

    kept: tuple[str, ...]
    left: tuple[str, ...]


def roll_back(
    journal: Journal,
    vllm_root: str,
    effects: Effects,
    *,
    touched: frozenset[str] | None = None,
    adopted: frozenset[str] = frozenset(),
) -> Undone:
    """Undoes a transaction.

    `touched` names what this very process replaced: those are put back whatever they hold now.
    `adopted` names what another vLLM has come to need since: those stay.
    Raises HotfixError (exit 5) listing what could not be put back.
    """
    effects.may_stop = False
    failed: list[str] = []
    left: list[str] = []
    kept: list[str] = []
    for entry in reversed(journal.files):
        with _noting(failed, entry.path):
            if entry.path in adopted or not _restore(entry, effects, touched):
                kept.append(entry.path)
        with _noting(left, entry.temp):
            effects.remove(entry.temp)
    for tree in reversed(journal.trees):
        if tree.final not in adopted:
            with _noting(failed, tree.final):
                _restore_tree(tree, effects)
        for waiting in (tree.new, tree.old + PART, *([tree.old] if tree.final in adopted else [])):
            with _noting(left, waiting):
                effects.remove_tree(waiting)
    for folder in reversed(journal.folders):
        with _noting(left, folder):
            effects.remove_folder_if_empty(folder)
    if not failed and not left:
        with _noting(left, state.journal_path(vllm_root)):
            _close(vllm_root, effects)
    effects.may_stop = True
    if failed:
        raise HotfixError(
            "rollback-failed",
            "the rollback failed: these files are in an unknown state. Do not start this vLLM.",
            exit_code=BROKEN,
            context=(*failed, *left),
            hint="remove the cause, then: python3 hotfix.py revert",
            state="interrupted",
        )
    return Undone(tuple(kept), tuple(left))


def finish(journal: Journal, vllm_root: str, effects: Effects) -> None:
    """Clears away what a committed transaction no longer needs.

    The work is done by then: what fails here is tried once more, and then left to the next run.
    """
    effects.may_stop = False
    for _ in range(2):
        with suppress(Exception):
            _tidy(journal, vllm_root, effects)
            break
    effects.may_stop = True


def committed(journal: Journal) -> Journal:
    """The journal as it is once everything is in place."""
    return replace(journal, phase=COMMITTED)


def _tidy(journal: Journal, vllm_root: str, effects: Effects) -> None:
    for tree in journal.trees:
        effects.remove_tree(tree.old)
    for folder in journal.empty:
        effects.remove_folder_if_empty(folder)
    _close(vllm_root, effects)


def _close(vllm_root: str, effects: Effects) -> None:
    path = state.journal_path(vllm_root)
    effects.remove_tree(state.undo_folder(vllm_root))
    effects.remove(f"{path}.tmp")
    effects.remove(path)
    effects.sync_folder(os.path.dirname(path))


@contextmanager
def _noting(failed: list[str], path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        failed.append(f"{path}: {error.strerror or error}")


def _restore(entry: FileEntry, effects: Effects, touched: frozenset[str] | None) -> bool:
    now = read_file(entry.path)
    digest = None if now is None else sha256(now)
    if digest == entry.before:
        return True
    if digest != entry.after and entry.path not in (touched or ()):
        return False
    if entry.undo is None:
        effects.remove(entry.path)
        effects.sync_folder(os.path.dirname(entry.path))
        return True
    old = read_file(entry.undo)
    if old is None or sha256(old) != entry.before:
        raise OSError(f"its old bytes are not in {entry.undo}")
    effects.write(entry.temp, old, entry.mode, (entry.uid, entry.gid))
    effects.rename(entry.temp, entry.path)
    if read_file(entry.path) != old:
        raise OSError("reads back differently from what was written")
    return True


def _restore_tree(tree: TreeEntry, effects: Effects) -> None:
    if os.path.isdir(tree.old):
        effects.remove_tree(tree.final)
        effects.rename(tree.old, tree.final)
    elif not tree.had:
        effects.remove_tree(tree.final)
