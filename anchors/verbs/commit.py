"""VerifiedPlan -> commit -> Receipt: the one way by which a verb writes.

`writing` is crash-safe and knows nothing of anchors: it takes a Job, which is paths and bytes. A
Job is made here and nowhere else, and only from a plan that is proven.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from anchors.digests import read_file
from anchors.engine import caches, receipt, staging
from anchors.engine.assess import Assessment, as_report
from anchors.engine.plan import Plan
from anchors.engine.prove import VerifiedPlan
from anchors.engine.receipt import Receipt
from anchors.report import Report
from anchors.verbs.session import Session
from anchors.writing import preflight, state, transaction
from anchors.writing.transaction import FileChange, Job


@dataclass(frozen=True)
class Work:
    """A plan with all that goes with it: the job, the receipt that then lies in the tree (None:
    all is taken out), and notes for the person."""

    job: Job
    receipt: Receipt | None
    notes: tuple[str, ...]


def work_of(verified: VerifiedPlan) -> Work:
    """What `commit` would write now: files, overlay, caches, and records last.

    Raises HotfixError where the overlay or a cache forbids it (3, 6).
    """
    plan = verified.plan
    vllm_root = plan.target.root
    originals = state.originals_folder(vllm_root)
    if plan.overlay is None:
        parts = [staging.unstage(plan.overlay_root, vllm_root)]
        record, records = None, _removed_records(vllm_root)
        folders, empty, recompiled = [], [originals], True
    else:
        parts = [staging.stage(plan.overlay_root, vllm_root, plan.overlay)]
        if plan.former and plan.former.overlay_root != plan.overlay_root:
            parts.append(staging.unstage(plan.former.overlay_root, vllm_root))
        content = _as_applied(plan)
        record, records = receipt.read(content), _kept_records(plan, content)
        folders, empty = [originals], []
        recompiled = plan.former is None or plan.former.plan != plan.digest
    changed = [file.path for file in plan.edits]
    files = [
        FileChange(os.path.join(vllm_root, file.path), file.current, file.after)
        for file in plan.edits
    ]
    job = Job(
        vllm_root=vllm_root,
        files=(*files, *(change for part in parts for change in part.files)),
        trees=tuple(tree for part in parts for tree in part.trees),
        caches=tuple(caches.stale(vllm_root, changed, compiled=recompiled)) if files else (),
        records=tuple(change for change in records if change.before != change.after),
        folders=(*(path for part in parts for path in part.folders), *folders),
        empty=(*empty, *(path for part in parts for path in part.empty)),
    )
    return Work(job, record, tuple(note for part in parts for note in part.notes))


def commit(verified: VerifiedPlan, session: Session) -> Work:
    """Writes all of it, or nothing; gives what was written. The session holds the lock.

    Raises HotfixError: refused before the first write (3, 6), rolled back (4), rollback failed
    (5), interrupted and rolled back (130).
    """
    work = work_of(verified)
    job = replace(work.job, folders=(*session.made, *work.job.folders))
    preflight.check(job)
    transaction.perform(job, session.effects)
    return work


def _as_applied(plan: Plan) -> Report:
    """The report as it will be once the plan is carried out."""
    content = as_report(Assessment(plan, "applied", "", plan.notes, "staged"), "apply")
    for file in content["files"]:
        for anchor in file["anchors"]:
            if anchor["state"] != "not-applicable":
                anchor.update(state="applied", detail="")
    content.update(judged=plan.judged, platform=plan.platform)
    return content


def _kept_records(plan: Plan, content: Report) -> list[FileChange]:
    """The originals of the files that carry a block, and the receipt last."""
    vllm_root = plan.target.root
    records = [
        _change(state.original_path(vllm_root, file.path), file.stock)
        for file in plan.files
        if file.stock and file.stock != file.after
    ]
    return [*records, _change(state.receipt_path(vllm_root), receipt.encode(content))]


def _removed_records(vllm_root: str) -> list[FileChange]:
    originals = state.originals_folder(vllm_root)
    names = sorted(os.listdir(originals)) if os.path.isdir(originals) else []
    paths = [state.receipt_path(vllm_root), *(os.path.join(originals, name) for name in names)]
    return [_change(path, None) for path in paths if os.path.exists(path)]


def _change(path: str, after: bytes | None) -> FileChange:
    """The change that makes `path` hold `after` (None: be gone), from whatever is there."""
    return FileChange(path, read_file(path), after)
