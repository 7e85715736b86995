"""revert: takes blocks, overlay and records out again, without LibCST and without a receipt."""

from __future__ import annotations

import argparse
import os

from anchors import report
from anchors.digests import sha256
from anchors.engine import removal
from anchors.engine.plan import Plan
from anchors.engine.prove import VerifiedPlan, prove
from anchors.engine.target import Target
from anchors.report import Report
from anchors.verbs import commit
from anchors.verbs.session import open_session
from anchors.writing import journal, preflight, state
from anchors.writing.effects import Effects


def run(arguments: argparse.Namespace, target: Target) -> Report:
    """Reverts, idempotently. Raises HotfixError with the exit code of the table."""
    interrupted = journal.load(target.root) is not None
    verified = _verified(arguments, target)
    work = commit.work_of(verified)
    if not (interrupted or _has_work(work)) or arguments.dry_run:
        return _result(verified.plan, work, pending=_has_work(work), changed=False)
    preflight.check(work.job)
    with open_session(target, Effects()) as session:
        verified = _verified(arguments, target)
        overlay_root = verified.plan.overlay_root
        session.hold([overlay_root] if os.path.isdir(overlay_root) else [])
        work = commit.commit(verified, session)
    result = _result(verified.plan, work, pending=False, changed=True)
    result["notes"] += session.notes
    return result


def _verified(arguments: argparse.Namespace, target: Target) -> VerifiedPlan:
    return prove(removal.make(target, arguments.overlay_root))


def _has_work(work: commit.Work) -> bool:
    job = work.job
    notes = os.path.isdir(state.folder(job.vllm_root))
    return bool(job.files or job.trees or job.records or notes)


def _result(plan: Plan, work: commit.Work, *, pending: bool, changed: bool) -> Report:
    """The report; the plan's own state is what the tree is once our blocks are out."""
    result = report.blank()
    result.update(
        verb="revert",
        state="applied" if pending and plan.edits else plan.state,
        detail=plan.detail,
        changed=changed,
        vllm={"root": plan.target.root, "version": plan.target.version},
        files=[
            {
                "path": file.path,
                "before": sha256(file.current or b""),
                "after": sha256(file.after or b""),
                "anchors": [],
            }
            for file in plan.edits
        ],
        caches=list(work.job.caches) if changed else [],
        notes=[*plan.notes, *work.notes],
        summary=_summary(plan.state, pending=pending, changed=changed),
    )
    return result


def _summary(without: str, *, pending: bool, changed: bool) -> str:
    """The last line, for a vLLM that is `without` once our blocks are out."""
    if without != "superseded":
        return "would be taken out" if pending else "this vLLM is as it was before the hotfix"
    if pending:
        return "what is left of the hotfix would be taken out"
    if changed:
        return "what was left of the hotfix is taken out; this vLLM needs none"
    return "nothing to take out; this vLLM needs no hotfix"
