"""apply: makes it so, or changes nothing."""

from __future__ import annotations

import os
from dataclasses import replace

from anchors.cli.report import Report
from anchors.engine import caches, overlay, receipt
from anchors.engine import prove as check
from anchors.engine.assess import Judged, Options, as_report, judge, refuse, refuse_partial
from anchors.engine.target import Target
from anchors.errors import NO, HotfixError, refused, unexpected
from anchors.verbs.session import writing
from anchors.writing import journal, preflight
from anchors.writing.effects import Effects
from anchors.writing.transaction import FileChange, Job, commit

_READY = "image input for DeepSeek-V4-Flash-Vision-Exp is in place"
_WRITING = ("pristine", "outdated", "stale", "applied-unrecorded", "interrupted")


def apply(target: Target, options: Options, effects: Effects) -> Report:
    """Applies; idempotent. Raises HotfixError with the exit code of the table."""
    judged = judge(target, options)
    _check(judged, options)
    if options.dry_run or judged.state not in _WRITING:
        return _result(judged, changed=False)
    if judged.state != "interrupted":
        preflight.check(_job(judged)[0])
    with writing(target, effects) as session:
        again = judge(target, options)
        _check(again, options)
        if again.state not in _WRITING:
            return _result(again, changed=bool(session.notes))
        if judged.state != "interrupted":
            _refuse_changed(judged, again)
        session.hold(_overlay_roots(again))
        job, more = _job(again)
        job = replace(job, folders=(*session.made, *job.folders))
        preflight.check(job)
        commit(job, effects)
    try:
        return _written(judge(target, options), job, (*session.notes, *more))
    except (Exception, KeyboardInterrupt) as error:
        raise _unchecked(error) from error


def _overlay_roots(judged: Judged) -> set[str]:
    """The overlay root to write, and the one to leave where another was asked for."""
    record = judged.receipt
    return {judged.plan.root, *([str(record["overlay"]["root"])] if record else [])}


def _written(done: Judged, job: Job, notes: tuple[str, ...]) -> Report:
    if done.state == "interrupted" and done.plan.state == "applied":
        # All is in place, and so says the journal; only clearing it away failed.
        done = replace(done, state="applied", detail="")
        notes = (*notes, "old files could not be cleared away; the next run tries again")
    if done.state != "applied":
        raise HotfixError(
            "not-as-planned",
            f"written, but now judged {done.state}: {done.detail}. Do not start this vLLM.",
            exit_code=NO,
            hint="python3 hotfix.py verify",
            state=done.state,
        )
    result = _result(done, changed=True)
    result["caches"] = list(job.caches)
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


def _check(judged: Judged, options: Options) -> None:
    refuse(judged)
    if options.strict:
        refuse_partial(judged)
    prove(judged)


def prove(judged: Judged) -> None:
    """Proves what apply would write now. Raises HotfixError (exit 3) where that fails."""
    if judged.state in _WRITING and judged.state != "interrupted":
        check.prove(judged.plan)


def _refuse_changed(first: Judged, second: Judged) -> None:
    """Somebody wrote a target while this run waited: what was proven is not what is there."""
    for file, before, now in zip(second.plan.files, first.bytes_now, second.bytes_now, strict=True):
        if before != now and first.state == second.state:
            raise refused(
                "target-changed",
                f"{file.path} was changed by somebody else during this run. Nothing was changed.",
                hint="python3 hotfix.py apply",
                state=second.state,
            )


def _result(judged: Judged, *, changed: bool) -> Report:
    result = as_report(judged, "apply")
    result["changed"] = changed
    if judged.state == "applied":
        result["summary"] = f"{_READY} (plan {judged.plan.digest[:12]})"
    elif judged.state == "superseded":
        result["summary"] = f"nothing to do: {judged.detail}"
    return result


def _job(judged: Judged) -> tuple[Job, tuple[str, ...]]:
    """What has to be written, and notes. Raises HotfixError where the overlay forbids it."""
    plan, record = judged.plan, judged.receipt
    root = plan.target.root
    files = tuple(
        FileChange(os.path.join(root, file.path), file.current, file.after)
        for file in plan.files
        if file.current != file.after
    )
    work = overlay.staging(plan.root, root)
    former = overlay.Work()
    if record and record["overlay"]["root"] != plan.root:
        former = overlay.removal(str(record["overlay"]["root"]), root)
    originals = os.path.join(root, journal.STATE_FOLDER, "originals")
    records = [
        existing(os.path.join(originals, file.path.replace("/", "__")), file.stock)
        for file in plan.files
        if file.stock and file.stock != file.after
    ]
    records.append(existing(receipt.receipt_path(root), receipt.encode(_applied(judged))))
    changed = [os.path.relpath(change.path, root) for change in files]
    recompiled = record is None or record["plan"] != plan.digest
    job = Job(
        root=root,
        files=(*files, *work.files, *former.files),
        trees=(*work.trees, *former.trees),
        caches=tuple(caches.stale(root, changed, compiled=recompiled)) if files else (),
        records=tuple(change for change in records if change.before != change.after),
        folders=(*work.folders, originals),
        empty=former.empty,
    )
    return job, (*work.notes, *former.notes)


def _applied(judged: Judged) -> Report:
    """The report as it will be once the plan is carried out."""
    content = as_report(replace(judged, state="applied", overlay_state="staged"), "apply")
    for file in content["files"]:
        for anchor in file["anchors"]:
            if anchor["state"] != "not-applicable":
                anchor.update(state="applied", detail="")
    return content


def existing(path: str, after: bytes | None) -> FileChange:
    """The change that makes `path` hold `after` (None: be gone), from whatever is there."""
    before = None
    if os.path.exists(path):
        with open(path, "rb") as file:
            before = file.read()
    return FileChange(path, before, after)
