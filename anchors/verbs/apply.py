"""apply: makes it so, or changes nothing."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace

from anchors.doctor import machine
from anchors.engine import assess
from anchors.engine.assess import DONE_STATES, Assessment
from anchors.engine.overlay import Package, package
from anchors.engine.prove import VerifiedPlan, prove
from anchors.engine.target import Target
from anchors.errors import NO, HotfixError, refused, unexpected
from anchors.report import Report
from anchors.verbs import commit
from anchors.verbs.inspect import unified_diff
from anchors.verbs.session import open_session
from anchors.writing import preflight
from anchors.writing.effects import Effects

_READY = "image input for DeepSeek-V4-Flash-Vision-Exp is in place"


def run(arguments: argparse.Namespace, target: Target, shipped: Mapping[str, bytes]) -> Report:
    """Applies, idempotently. Raises HotfixError with the exit code of the table."""
    overlay = package(shipped)
    found = assess.assess(target, overlay, arguments.overlay_root)
    verified = _verified(found, strict=arguments.strict)
    if arguments.dry_run:
        return _rehearsed(arguments, found)
    if found.state == "interrupted" or verified:
        return _written(arguments, found, verified, overlay)
    return _result(found, changed=False)


def _verified(found: Assessment, *, strict: bool) -> VerifiedPlan | None:
    """What may be committed, None where nothing is to be written, or not yet (interrupted).

    Raises HotfixError (exit 3) for trees that apply refuses.
    """
    assess.refuse(found)
    if strict:
        assess.refuse_partial(found)
    return prove(found.plan) if found.needs_writing else None


def _rehearsed(arguments: argparse.Namespace, found: Assessment) -> Report:
    result = _result(found, changed=False)
    if found.state not in DONE_STATES:
        result["summary"] = "would be applied; nothing was written"
    result["diff"] = unified_diff(found.plan, reverse=False, context=3).text
    if not arguments.json and not arguments.quiet:
        print(result["diff"], end="")
    return result


def _written(
    arguments: argparse.Namespace,
    found: Assessment,
    verified: VerifiedPlan | None,
    overlay: Package,
) -> Report:
    """Assesses and proves once more under the lock, commits that, and looks at the result."""
    target = found.plan.target
    if verified:
        preflight.check(commit.work_of(verified).job)
    with open_session(target, Effects()) as session:
        now = assess.assess(target, overlay, arguments.overlay_root)
        under_lock = _verified(now, strict=arguments.strict)
        if now.state == "interrupted":  # finished, and its journal could not be cleared away
            assess.refuse(replace(now, state=now.plan.state, detail=now.plan.detail))
            under_lock = prove(now.plan)
        if under_lock is None:
            return _result(now, changed=bool(session.notes))
        if verified:
            _refuse_changed(found, now)
        session.hold(_overlay_roots(now))
        work = commit.commit(under_lock, session)
    try:
        done = assess.assess(target, overlay, arguments.overlay_root)
        return _checked(done, work, (*session.notes, *work.notes))
    except (Exception, KeyboardInterrupt) as error:
        raise _unchecked(error) from error


def _overlay_roots(found: Assessment) -> set[str]:
    """The overlay root to write, and the one to leave where another was asked for."""
    former = found.plan.former
    return {found.plan.overlay_root, *([former.overlay_root] if former else [])}


def _checked(done: Assessment, work: commit.Work, notes: tuple[str, ...]) -> Report:
    """The answer, where the last look finds in the tree what was written."""
    if done.state == "interrupted" and done.plan.state == "applied":
        # All is in place, and so says the journal; only clearing it away failed.
        done = replace(done, state="applied", detail="")
        notes = (*notes, "old files could not be cleared away; the next run tries again")
    if done.state != "applied" or done.plan.former != work.receipt:
        raise HotfixError(
            "not-as-planned",
            f"written, but now judged {done.state}: {done.detail}. Do not start this vLLM.",
            exit_code=NO,
            hint="python3 hotfix.py verify",
            state=done.state,
        )
    result = _result(done, changed=True)
    result["caches"] = list(work.job.caches)
    result["notes"] += notes
    return result


def _unchecked(error: BaseException) -> HotfixError:
    """All was written and read back; what failed is looking at it once more."""
    if isinstance(error, HotfixError) and error.reference == "not-as-planned":
        return error
    consequence = "All was written before; `python3 hotfix.py verify` says whether it holds."
    if isinstance(error, (HotfixError, OSError, KeyboardInterrupt)):
        words = str(error) or "interrupted"
        return HotfixError(
            "not-checked",
            f"the last look failed: {words} {consequence}",
            exit_code=NO,
            hint="python3 hotfix.py verify",
        )
    return unexpected(error, consequence, exit_code=NO)


def _refuse_changed(first: Assessment, second: Assessment) -> None:
    """Somebody wrote a target while this run waited: what was proven is not what is there."""
    for before, now in zip(first.plan.files, second.plan.files, strict=True):
        if before.current != now.current and first.state == second.state:
            raise refused(
                "target-changed",
                f"{now.path} was changed by somebody else during this run. Nothing was changed.",
                hint="python3 hotfix.py apply",
                state=second.state,
            )


def _result(found: Assessment, *, changed: bool) -> Report:
    result = assess.as_report(found, "apply")
    result["changed"] = changed
    if found.state == "applied":
        result["summary"] = f"{_READY} (plan {found.plan.digest[:12]})"
    elif found.state == "superseded":
        result["summary"] = f"nothing to do: {found.detail}"
        result["notes"] += machine.notes_on_native(found.plan.target.root)
    return result
