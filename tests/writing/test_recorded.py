"""What reaches the disk, and in which order: the calls of one run are recorded and checked.

The journal's promise: old bytes and the journal are on the disk before anything is replaced, new
bytes before they take a place, and every name that was changed before the run says it is done.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from anchors.errors import HotfixError
from anchors.writing import journal as journals
from anchors.writing import state, transaction
from anchors.writing.effects import Effects
from anchors.writing.transaction import FileChange, Job, TreeChange


class Recorder:
    """The calls that change a disk, as (what, path); a path is where the file is at that time."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str]] = []
        for name in ("rename", "unlink", "mkdir", "rmdir"):
            self._watch(patch, name)
        fsync, open_ = os.fsync, os.open

        def synced(handle: int) -> None:
            self.calls.append(("fsync", str(Path(f"/proc/self/fd/{handle}").readlink())))
            fsync(handle)

        def opened(path: str, flags: int, *rest: int, **options: int) -> int:
            if flags & os.O_WRONLY:
                self.calls.append(("write", str(path)))
                assert flags & os.O_NOFOLLOW
            return open_(path, flags, *rest, **options)

        patch.setattr(os, "fsync", synced)
        patch.setattr(os, "open", opened)

    def _watch(self, patch: pytest.MonkeyPatch, name: str) -> None:
        original = getattr(os, name)

        def call(path: str, *rest: str, **options: int) -> None:
            # A tree that is cleared away goes by handles: its order is nobody's promise.
            if not options.get("dir_fd"):
                target = str(rest[0]) if name == "rename" else str(path)
                self.calls.append((name, target))
                if name == "rename":
                    self.calls.append(("from", str(path)))
            original(path, *rest, **options)

        patch.setattr(os, name, call)

    def index(self, what: str, path: object, after: int = 0) -> int:
        return self.calls.index((what, str(path)), after)


@pytest.fixture
def box(tmp_path: Path):
    (tmp_path / "vllm" / state.FOLDER).mkdir(parents=True)
    (tmp_path / "vllm" / "a.py").write_bytes(b"old a")
    (tmp_path / "vllm" / "a.py").chmod(0o640)
    (tmp_path / "vllm" / "gone.py").write_bytes(b"old gone")
    (tmp_path / "root").mkdir()
    before = os.umask(0o077)  # what is made is to be read by a server of another user
    yield tmp_path
    os.umask(before)


def job(box: Path, **changes: object) -> Job:
    root = box / "vllm"
    stock: dict = {
        "vllm_root": str(root),
        "files": (
            FileChange(str(root / "a.py"), b"old a", b"new a"),
            FileChange(str(root / "gone.py"), b"old gone", None),
        ),
        "trees": (TreeChange(str(box / "root" / "vision_exp"), {"x/y.py": b"y", "z.py": b"z"}),),
        "records": (FileChange(state.receipt_path(str(root)), None, b"{}"),),
    }
    return Job(**{**stock, **changes})


def files(box: Path) -> dict[str, bytes]:
    return {str(p.relative_to(box)): p.read_bytes() for p in box.rglob("*") if p.is_file()}


def check_order(seen: Recorder, box: Path) -> None:
    """Every name that a rename or removal changed is synced, every file before its rename."""
    calls = seen.calls
    for at, (what, path) in enumerate(calls):
        if what == "rename":
            source = calls[at + 1][1]
            wrote = [i for i, call in enumerate(calls[:at]) if call == ("write", source)]
            assert not wrote or ("fsync", source) in calls[wrote[-1] : at], f"{source} not synced"
        elif what == "write":
            assert ("fsync", path) in calls[at:], f"{path} not synced"
        own = ".tmp" in path or "/undo" in path or ".vision-exp-" in path
        if what == "rename" or (what == "unlink" and not own):
            folder = str(Path(path).parent)
            later = [i for i, call in enumerate(calls) if i > at and call == ("fsync", folder)]
            assert later, f"the name {path} is not synced"
            others = [i for i in range(at + 2, later[0]) if calls[i][0] in ("rename", "unlink")]
            assert not others, f"{path} is not synced before {calls[others[0]]}"


def test_a_run_keeps_the_journals_promise(box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = box / "vllm"
    seen = Recorder(monkeypatch)
    transaction.perform(job(box), Effects())
    check_order(seen, box)
    journal = state.journal_path(str(root))
    undo = state.undo_folder(str(root))
    opened = seen.index("rename", journal)
    synced = seen.index("fsync", undo)
    assert max(seen.index("fsync", f"{undo}/{n}") for n in (0, 1)) < synced < opened
    first = seen.index("rename", root / "a.py")
    done = seen.index("rename", journal, opened + 1)
    assert not [call for call in seen.calls[:opened] if call[1].endswith((".py", "receipt.json"))]
    assert opened < min(seen.index("mkdir", box / "root" / ".vision-exp"), first)
    assert ("write", journal) not in seen.calls
    places = (root / "gone.py", box / "root" / "vision_exp", state.receipt_path(str(root)))
    for what, path in zip(("unlink", "rename", "rename"), places, strict=True):
        assert first < seen.index(what, path) < done
    closed = seen.index("unlink", journal)
    assert done < closed < seen.index("fsync", root / state.FOLDER, closed)
    modes = {
        p: stat.S_IMODE((box / p).stat().st_mode)
        for p in (
            "vllm/a.py",
            "root/vision_exp",
            "root/vision_exp/x",
            "root/vision_exp/x/y.py",
        )
    }
    assert list(modes.values()) == [0o640, 0o755, 0o755, 0o644]


FAULTS = ["a.py", "gone.py", "root/vision_exp", "receipt.json"]


@pytest.mark.parametrize("name", FAULTS)
def test_a_rollback_keeps_it_too(box: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also from a new file that was there for a moment, and an overlay that was replaced."""
    (box / "root" / "vision_exp").mkdir()
    (box / "root" / "vision_exp" / "former.py").write_bytes(b"former")
    added = FileChange(str(box / "vllm" / "new.py"), None, b"new")
    work = job(box, files=(added, *job(box).files))
    before = files(box)
    seen = Recorder(monkeypatch)
    effects = Effects()
    reached: list[str] = []

    def fail(what: str, path: str) -> None:
        if path.endswith(name) and what in ("rename", "remove") and not reached:
            reached.append(path)
            raise OSError(errno.EIO, "bad disk", path)

    monkeypatch.setattr(effects, "before_step", fail)
    with pytest.raises(OSError, match="bad disk"):
        transaction.perform(work, effects)
    assert reached
    check_order(seen, box)
    assert files(box) == before
    assert effects.may_stop


def corrupt_tree(box: Path) -> Path:
    return box / "root" / "vision_exp" / "z.py"


def corrupt_file(box: Path) -> Path:
    return box / "vllm" / "a.py"


@pytest.mark.parametrize("place", [corrupt_tree, corrupt_file])
def test_what_reads_back_differently_is_rolled_back(
    box: Path, monkeypatch: pytest.MonkeyPatch, place
) -> None:
    before = files(box)
    effects = Effects()
    rename = effects.rename

    def torn(old: str, new: str) -> None:
        rename(old, new)
        if new.endswith("receipt.json"):
            place(box).write_bytes(b"torn")

    monkeypatch.setattr(effects, "rename", torn)
    with pytest.raises(OSError, match="reads back differently"):
        transaction.perform(job(box), effects)
    assert files(box) == before


@pytest.fixture
def killed(box: Path, monkeypatch: pytest.MonkeyPatch) -> journals.Journal:
    """The journal of a run that was killed before its receipt."""

    class Killed(BaseException):
        pass

    effects = Effects()

    def die(what: str, path: str) -> None:
        if what == "rename" and path.endswith("receipt.json"):
            raise Killed

    monkeypatch.setattr(effects, "before_step", die)
    with monkeypatch.context() as patch:
        patch.setattr(journals, "roll_back", lambda *_, **__: journals.Undone((), ()))
        with pytest.raises(Killed):
            transaction.perform(job(box), effects)
    found = journals.load(str(box / "vllm"))
    assert found is not None and found.phase == journals.WRITING
    return found


def test_files_of_somebody_else_stay_in_a_rollback(box: Path, killed: journals.Journal) -> None:
    place = box / "vllm" / "a.py"
    place.write_bytes(b"somebody else's")
    undone = journals.roll_back(killed, str(box / "vllm"), Effects())
    assert undone.kept == (str(place),)
    assert place.read_bytes() == b"somebody else's"
    assert (box / "vllm" / "gone.py").read_bytes() == b"old gone"
    assert not (box / "root" / "vision_exp").exists()


def test_what_another_vllm_needs_stays(box: Path, killed: journals.Journal) -> None:
    adopted = frozenset((str(box / "root" / "vision_exp"), str(box / "vllm" / "a.py")))
    journals.roll_back(killed, str(box / "vllm"), Effects(), adopted=adopted)
    assert (box / "root" / "vision_exp" / "z.py").read_bytes() == b"z"
    assert (box / "vllm" / "a.py").read_bytes() == b"new a"


def test_a_rollback_that_cannot_put_all_back_keeps_its_journal(
    box: Path, killed: journals.Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(box / "vllm")
    undo = Path(state.undo_folder(root), "0")
    kept = undo.read_bytes()
    undo.write_bytes(b"not the old bytes")
    with pytest.raises(HotfixError) as failed:
        journals.roll_back(killed, root, Effects())
    assert "a.py" in failed.value.context[0]
    assert journals.load(root) == killed
    undo.write_bytes(kept)
    effects = Effects()
    rename = effects.rename
    with monkeypatch.context() as patch:
        patch.setattr(effects, "rename", lambda a, b: (rename(a, b), Path(b).write_bytes(b"x")))
        with pytest.raises(HotfixError):
            journals.roll_back(killed, root, effects)


def test_a_second_signal_does_not_stop_a_rollback(box: Path, killed: journals.Journal) -> None:
    effects = Effects()
    effects.interrupted = "SIGINT"
    journals.roll_back(killed, str(box / "vllm"), effects)
    assert (box / "vllm" / "a.py").read_bytes() == b"old a"
    with pytest.raises(HotfixError, match="interrupted by SIGINT"):
        effects.before_step("write", "x")


def test_a_journal_of_another_schema_is_refused(box: Path, killed: journals.Journal) -> None:
    path = Path(state.journal_path(str(box / "vllm")))
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 2'))
    with pytest.raises(HotfixError, match="another version"):
        journals.load(str(box / "vllm"))


def test_owner_and_links(box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "fchown", lambda handle, *owner: given.append(owner))
    Effects().write(str(box / "x"), b"", 0o644, (12345, 54321))
    assert given == [(12345, 54321)]
    target = box / "target"
    target.mkdir()
    (box / "link").symlink_to(target)
    with pytest.raises(OSError):
        Effects().write(str(box / "link"), b"")
    Effects().remove_tree(str(box / "link"))
    assert target.is_dir()
    transaction.perform(job(box), effects := Effects())
    assert effects.may_stop


def test_old_bytes_are_for_the_user_alone(box: Path, killed: journals.Journal) -> None:
    assert stat.S_IMODE(Path(state.undo_folder(str(box / "vllm"))).stat().st_mode) == 0o700
