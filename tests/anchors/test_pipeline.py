"""Target to receipt, one way: each step is done once, and nothing unproven is written."""

from __future__ import annotations

import builtins
import os
from collections import Counter
from pathlib import Path

import hotfix_rig
import pytest
from hotfix_rig import REPO, Rig
from mypy import api

from anchors.digests import package_files
from anchors.engine import assess

COMMITS = """\
from anchors.engine.plan import Plan
from anchors.engine.prove import VerifiedPlan
from anchors.verbs.commit import commit
from anchors.verbs.session import Session
from anchors.writing.transaction import Job


def takes(verified: VerifiedPlan, session: Session) -> None:
    commit(verified, session)


def refuses(plan: Plan, job: Job, session: Session) -> None:
    commit(plan, session)
    commit(job, session)
    commit(None, session)
"""


def test_commit_takes_a_verified_plan_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "commits.py"
    file.write_text(COMMITS)
    monkeypatch.chdir(REPO)
    monkeypatch.setenv("MYPYPATH", str(REPO))
    out, err, code = api.run(["--no-error-summary", f"--cache-dir={tmp_path}", str(file)])
    assert code == 1, out + err
    found = [line.partition("commits.py:")[2] for line in out.splitlines() if ": error:" in line]
    wrong = 'error: Argument 1 to "commit" has incompatible type'
    assert found == [
        f'{line}: {wrong} "{kind}"; expected "VerifiedPlan"  [arg-type]'
        for line, kind in ((13, "Plan"), (14, "Job"), (15, "None"))
    ]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return hotfix_rig.make(tmp_path / "rig", "0.25.0")


class Counts:
    """How often a run opens each file of the shipped overlay, and how often it plans the tree."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.opened: Counter[str] = Counter()
        self.planned = 0
        shipped = str(REPO / "vision_exp")
        open_, make = builtins.open, assess.make

        def counting_open(file, *rest, **options):
            path = os.fspath(file) if not isinstance(file, int) else ""
            if str(path).startswith(shipped + os.sep):
                self.opened[os.path.relpath(path, shipped)] += 1
            return open_(file, *rest, **options)

        def counting_make(*rest, **options):
            self.planned += 1
            return make(*rest, **options)

        patch.setattr(builtins, "open", counting_open)
        patch.setattr(assess, "make", counting_make)

    def reset(self) -> None:
        self.opened.clear()
        self.planned = 0


ONCE = dict.fromkeys(package_files(str(REPO / "vision_exp")), 1)


def test_the_shipped_overlay_is_read_once_and_the_tree_assessed_no_oftener_than_needed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = Counts(monkeypatch)
    lost_receipt = ("status", "verify", "diff", "doctor")
    runs = [
        (("apply", "--dry-run"), 1),
        *(((verb,), 1) for verb in lost_receipt),
        (("apply",), 3),  # before the lock, under it, and the last look
        (("apply",), 0),  # the receipt answers
        (("status",), 0),
        (("verify",), 1),
    ]
    for words, planned in runs:
        counts.reset()
        assert rig.run(*words).code in (0, 1)
        assert dict(counts.opened) == ONCE, words
        assert counts.planned == planned, words
    # With a receipt that no longer holds, the fast look has read it before the full one.
    (rig.overlay / "vision_exp" / "config.py").unlink()
    for words, planned in ((("status",), 1), (("apply",), 3)):
        counts.reset()
        assert rig.run(*words).code in (0, 1)
        assert dict(counts.opened) == ONCE, words
        assert counts.planned == planned, words


def test_revert_reads_no_shipped_overlay(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rig.run("apply").code == 0
    counts = Counts(monkeypatch)
    assert rig.run("revert").code == 0
    assert not counts.opened
    assert counts.planned == 0


def test_what_revert_writes_is_proven_too(rig: Rig) -> None:
    """A file that would not compile without our blocks is left alone, with all the others."""
    assert rig.run("apply").code == 0
    path = rig.root / "models/deepseek_v4/nvidia/mtp.py"
    path.write_bytes(path.read_bytes() + b"def (\n")
    before = hotfix_rig.contents(rig.base)
    answer = rig.run("revert")
    assert answer.code == 3
    assert "mtp.py would not compile" in answer.cause
    assert hotfix_rig.contents(rig.base) == before
