"""Signals are held for the time of a run, and one run holds the lock."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from anchors.errors import HotfixError
from anchors.writing import lock, state, transaction
from anchors.writing.effects import Effects


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "vllm" / state.FOLDER).mkdir(parents=True)
    before = os.umask(0o077)
    yield tmp_path
    os.umask(before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_is_held_and_given_back(number: signal.Signals) -> None:
    heard: list[int] = []
    before = signal.signal(number, lambda *_: heard.append(1))
    try:
        effects = Effects()
        with transaction.signals_held(effects):
            os.kill(os.getpid(), number)
            assert effects.interrupted == number.name
        assert not heard
        os.kill(os.getpid(), number)
        assert heard
    finally:
        signal.signal(number, before)


@pytest.fixture
def held(box: Path) -> Iterator[Path]:
    path = box / "vllm" / state.FOLDER / "lock"
    with lock.locked(str(path), Effects(), 0):
        yield path


def test_a_lock_is_for_one_run_and_folders_for_everybody(box: Path, held: Path) -> None:
    with pytest.raises(HotfixError), lock.locked(str(held), Effects(), 0):
        pass
    with lock.folder_locked(str(box / "new" / "root"), Effects(), 0):
        assert stat.S_IMODE((box / "new" / "root").stat().st_mode) == 0o755


def test_a_lock_whose_file_was_replaced_locks_nothing(
    box: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run before ours removed the file between our opening and locking it."""
    path = box / "vllm" / state.FOLDER / "lock"
    flock, handles = fcntl.flock, []

    def replaced(handle: int, how: int) -> None:
        flock(handle, how)
        if not handles:
            path.unlink()
            path.write_bytes(b"")
        handles.append(handle)

    monkeypatch.setattr(fcntl, "flock", replaced)
    with lock.locked(str(path), Effects(), 5):
        assert len(handles) == 2
        path.unlink()
        path.write_bytes(b"another run's")
    assert path.read_bytes() == b"another run's"


@pytest.mark.parametrize("folder", [True, False])
def test_a_link_in_the_place_of_our_notes_is_refused(box: Path, folder: bool) -> None:
    elsewhere = box / "elsewhere"
    elsewhere.mkdir()
    notes = box / "vllm" / state.FOLDER
    if folder:
        notes.rmdir()
        notes.symlink_to(elsewhere)
    else:
        (notes / "lock").symlink_to(elsewhere / "x")
    wanted = pytest.raises(HotfixError, match="not what this tool makes")
    with wanted, lock.locked(str(notes / "lock"), Effects(), 0):
        pass
    assert not list(elsewhere.iterdir())
