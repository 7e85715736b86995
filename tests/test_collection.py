"""Every test file of the repository is one that the configured pytest collects."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from repository import ROOT, tracked


def uncollected(session: pytest.Session, root: Path, files: Iterable[Path]) -> list[Path]:
    """The files below `root` that `pytest` without arguments would pass over.

    Asks the session's own hooks about each file and the folders above it; imports none of them.
    """
    starts = [root / name for name in session.config.getini("testpaths")]
    return [file for file in files if not _collected(session, starts, file)]


def _collected(session: pytest.Session, starts: list[Path], file: Path) -> bool:
    above = [start for start in starts if start in file.parents]
    if not above:
        return False
    hook = session.gethookproxy(file.parent)
    visited = [path for path in (file, *file.parents) if above[0] in path.parents]
    if any(hook.pytest_ignore_collect(collection_path=p, config=session.config) for p in visited):
        return False
    return bool(hook.pytest_collect_file(file_path=file, parent=session))


def test_every_test_file_of_the_repository_is_collected(request: pytest.FixtureRequest) -> None:
    files = [path for path in tracked() if path.match("test_*.py") and path.is_file()]
    assert Path(__file__) in files
    assert uncollected(request.session, ROOT, files) == []


def test_a_file_in_an_excluded_folder_is_found(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    good = tmp_path / "tests" / "part" / "test_good.py"
    bad = [
        tmp_path / name
        for name in (
            "tests/gpu/test_excluded.py",
            "tests/gpu/jobs/test_below_it.py",
            "tests/.hidden/test_hidden.py",
            "bench/test_elsewhere.py",
            "tests/part/check_misnamed.py",
        )
    ]
    for path in (good, *bad):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert uncollected(request.session, tmp_path, [good, *bad]) == bad
