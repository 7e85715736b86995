"""apply, revert, status, verify, diff: what each does with a judged tree."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from anchors.engine import caches, check, fences, journal, overlay, preflight, receipt, report
from anchors.engine.digests import sha256
from anchors.engine.effects import Effects
from anchors.engine.errors import DONE, NO, HotfixError, refused
from anchors.engine.lock import locked
from anchors.engine.plan import Plan, make
from anchors.engine.report import Report
from anchors.engine.target import Target
from anchors.engine.transaction import FileChange, Job, commit, signals_held
from anchors.sites import all_anchors

_READY = "image input for DeepSeek-V4-Flash-Vision-Exp is in place"
_HINTS = {
    "drifted": "python3 hotfix.py -v status; look for a newer vision-exp for this vLLM",
    "mixed": "python3 hotfix.py revert, then apply; if revert refuses too, reinstall vLLM",
    "edited": "python3 hotfix.py revert (edits outside our blocks stay), then apply",
    "foreign": "start from an image without the other hotfix, or take it out, then apply",
    "missing": "reinstall this vLLM",
    "not-applicable": "use vLLM 0.22.0 or later with its NVIDIA sources",
}


@dataclass(frozen=True)
class Options:
    """What the command line asked for."""

    overlay_root: str | None = None
    dry_run: bool = False
    strict: bool = False


@dataclass(frozen=True)
class Judged:
    """A tree judged: the plan, its state with receipt and overlay considered, the receipt."""

    plan: Plan
    state: str
    detail: str
    receipt: receipt.Receipt | None
    notes: tuple[str, ...]
    overlay_state: str


def judge(target: Target, options: Options) -> Judged:
    """Target to state, without writing. Raises HotfixError for what cannot be judged."""
    record, note = receipt.load(target.root)
    recorded_root = str(record["overlay"]["root"]) if record else None
    digest = overlay.source_digest()
    plan = make(
        target,
        all_anchors(),
        root=overlay.requested_root(options.overlay_root) or recorded_root,
        default_root=overlay.DEFAULT_ROOT,
        overlay=digest,
        before=receipt.stock_digests(record),
    )
    staged = overlay.state_of(plan.root, digest)
    state, detail = plan.state, plan.detail
    notes = (*plan.notes, note) if note else plan.notes
    if state == "applied" and staged != "staged":
        state, detail = "stale", f"the overlay in {plan.root} is {staged}"
    elif state == "applied" and not _recorded(record, plan):
        state, detail = "applied-unrecorded", "applied, without a receipt that says so"
    if journal.load(target.root) is not None:
        state, detail = "interrupted", "an earlier run was interrupted; apply rolls it back first"
    return Judged(plan, state, detail, record, notes, staged)


def _recorded(record: receipt.Receipt | None, plan: Plan) -> bool:
    if record is None or record["plan"] != plan.digest:
        return False
    after = {file["path"]: file["after"] for file in record["files"]}
    return all(after.get(f.path) == (sha256(f.after) if f.after else None) for f in plan.files)


def as_report(judged: Judged, verb: str) -> Report:
    """The `--json` object for a judged tree."""
    plan = judged.plan
    full = report.blank()
    full.update(
        verb=verb,
        state=judged.state,
        detail=judged.detail,
        vllm={"root": plan.target.root, "version": plan.target.version},
        plan=plan.digest or None,
        files=[
            {
                "path": file.path,
                "before": sha256(file.stock) if file.stock else None,
                "after": sha256(file.after) if file.after else None,
                "anchors": [
                    {"id": anchor.id, "state": anchor.state, "detail": anchor.detail}
                    for anchor in file.anchors
                ],
            }
            for file in plan.files
        ],
        overlay={"root": plan.root, "digest": plan.overlay, "state": judged.overlay_state},
        notes=list(judged.notes),
    )
    if judged.state in _HINTS:
        full["error"] = _refusal(judged).as_json()
    return full


def status(target: Target, options: Options) -> Report:
    """One line per anchor; exit 0 where nothing is left to do."""
    result = as_report(judge(target, options), "status")
    good = ("applied", "applied-unrecorded", "superseded")
    result["exit"] = DONE if result["state"] in good else NO
    return result


def verify(target: Target, options: Options) -> Report:
    """Re-derives everything from the bytes and proves it; exit 1 where that does not hold."""
    judged = judge(target, options)
    result = as_report(judged, "verify")
    if judged.state in ("applied", "applied-unrecorded"):
        check.prove(judged.plan)
    elif judged.state != "superseded":
        result["exit"] = NO
    return result


def apply(target: Target, options: Options, effects: Effects) -> Report:
    """Makes it so, or changes nothing. Idempotent."""
    judged = judge(target, options)
    if options.dry_run or not _must_write(judged):
        return _apply_result(judged, options, changed=False)
    with _exclusive(target, effects) as kept:
        judged = judge(target, options)
        if not _must_write(judged):
            return _apply_result(judged, options, changed=False)
        _apply_result(judged, options, changed=False)  # refuses what must be refused
        check.prove(judged.plan)
        job, notes = _apply_job(judged)
        preflight.check(job)
        commit(job, effects)
    done = judge(target, options)
    result = _apply_result(done, options, changed=True)
    result["caches"] = list(job.caches)
    result["notes"] += [*notes, *kept]
    if done.state != "applied":
        raise HotfixError(
            "not-as-planned",
            f"written, but now judged {done.state}: {done.detail}. Do not start this vLLM.",
            exit_code=NO,
            hint="python3 hotfix.py verify",
            state=done.state,
        )
    return result


def revert(target: Target, options: Options, effects: Effects) -> Report:
    """Takes our blocks, overlay and records out again. Idempotent; needs no LibCST."""
    job, notes = _revert_job(target)
    if options.dry_run or not _has_work(target, job):
        return _reverted(target, job, notes, changed=False)
    with _exclusive(target, effects, hint="revert") as kept:
        job, notes = _revert_job(target)
        if _has_work(target, job):
            preflight.check(job)
            commit(job, effects)
    return _reverted(target, job, (*notes, *kept), changed=True)


@contextmanager
def _exclusive(target: Target, effects: Effects, hint: str = "apply") -> Iterator[list[str]]:
    """Signals held, lock held, an interrupted run rolled back or finished."""
    preflight.check(Job(target.root, ()))
    state = os.path.join(target.root, journal.STATE_FOLDER, "lock")
    kept: list[str] = []
    with signals_held(effects), locked(state, effects):
        opened = journal.load(target.root)
        if opened and opened.phase == journal.COMMITTED:
            journal.finish(opened, target.root, effects)
        elif opened:
            left = journal.roll_back(opened, target.root, effects)
            kept.append("rolled back an interrupted run first")
            kept += [f"{path} was written by somebody else since; left as it is" for path in left]
        yield kept


def _must_write(judged: Judged) -> bool:
    """Whether the state is one that apply changes; refusals and "done" are not."""
    return judged.state in ("pristine", "outdated", "stale", "applied-unrecorded", "interrupted")


def _apply_result(judged: Judged, options: Options, *, changed: bool) -> Report:
    """The report of apply; raises HotfixError (exit 3) where the tree must be refused."""
    if judged.state in _HINTS:
        raise _refusal(judged)
    if options.strict:
        _refuse_partial(judged)
    if options.dry_run and _must_write(judged) and judged.state != "interrupted":
        check.prove(judged.plan)
    result = as_report(judged, "apply")
    result["changed"] = changed
    if judged.state == "applied":
        result["summary"] = f"{_READY} (plan {judged.plan.digest[:12]})"
    elif judged.state == "superseded":
        result["summary"] = f"nothing to do: {judged.detail}"
    return result


def refuse(judged: Judged) -> None:
    """Raises HotfixError (exit 3) where the tree is one that apply refuses."""
    if judged.state in _HINTS:
        raise _refusal(judged)


def _refusal(judged: Judged) -> HotfixError:
    version = judged.plan.target.version or "of unknown version"
    detail = judged.detail or judged.state
    return refused(
        judged.state,
        f"vLLM {version} is {judged.state}: {detail}. Nothing was changed.",
        hint=_HINTS[judged.state],
        state=judged.state,
    )


def _refuse_partial(judged: Judged) -> None:
    rendering = {anchor.id for anchor in all_anchors() if anchor.render}
    for file in judged.plan.files:
        for anchor in file.anchors:
            if anchor.id in rendering and anchor.state == "not-applicable":
                raise refused(
                    "strict",
                    f"{anchor.id} is not applicable ({anchor.detail}) and --strict was given. "
                    "Nothing was changed.",
                    hint="leave --strict out to go without it",
                    state="not-applicable",
                )


def _apply_job(judged: Judged) -> tuple[Job, tuple[str, ...]]:
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
    recompiled = record is None or record["plan"] != plan.digest
    finished = replace(judged, state="applied", detail="", overlay_state="staged")
    content = as_report(finished, "apply")
    for file in content["files"]:
        for anchor in file["anchors"]:
            if anchor["state"] != "not-applicable":
                anchor["state"] = "applied"
    originals = os.path.join(root, journal.STATE_FOLDER, "originals")
    kept = [
        _record(os.path.join(originals, file.path.replace("/", "__")), file.stock)
        for file in plan.files
        if file.stock and file.stock != file.after
    ]
    kept.append(_record(receipt.receipt_path(root), receipt.encode(content)))
    changed = [os.path.relpath(change.path, root) for change in files]
    job = Job(
        root=root,
        files=(*files, *work.files, *former.files),
        trees=(*work.trees, *former.trees),
        caches=tuple(caches.stale(root, changed, compiled=recompiled)) if files else (),
        records=tuple(change for change in kept if change.before != change.after),
        folders=(*work.folders, originals),
        empty=former.empty,
    )
    return job, (*work.notes, *former.notes)


def _record(path: str, after: bytes | None) -> FileChange:
    before = None
    if os.path.exists(path):
        with open(path, "rb") as file:
            before = file.read()
    return FileChange(path, before, after)


def _revert_job(target: Target) -> tuple[Job, tuple[str, ...]]:
    root = target.root
    record, note = receipt.load(root)
    notes = [note] if note else []
    files = []
    for path in dict.fromkeys(anchor.file for anchor in all_anchors()):
        change = _without_blocks(root, path, receipt.stock_digests(record) or {}, notes)
        if change:
            files.append(change)
    folder = os.path.join(root, journal.STATE_FOLDER)
    originals = os.path.join(folder, "originals")
    records = [_record(receipt.receipt_path(root), None)]
    if os.path.isdir(originals):
        records += [
            _record(os.path.join(originals, n), None) for n in sorted(os.listdir(originals))
        ]
    overlay_root = _overlay_root(record, files)
    work = overlay.removal(overlay_root, root) if overlay_root else overlay.Work()
    changed = [os.path.relpath(change.path, root) for change in files]
    job = Job(
        root=root,
        files=(*files, *work.files),
        trees=work.trees,
        caches=tuple(caches.stale(root, changed, compiled=True)) if files else (),
        records=tuple(change for change in records if change.before is not None),
        empty=(originals, *work.empty),
    )
    return job, (*notes, *work.notes)


def _without_blocks(
    root: str, path: str, before: dict[str, str], notes: list[str]
) -> FileChange | None:
    full = os.path.join(root, path)
    if not os.path.isfile(full):
        return None
    with open(full, "rb") as file:
        data = file.read()
    parted = fences.split(data)
    if parted.broken:
        original = os.path.join(root, journal.STATE_FOLDER, "originals", path.replace("/", "__"))
        raise refused(
            "mixed",
            f"{path}: {parted.broken}. Our blocks cannot be told apart. Nothing was changed.",
            hint=(
                f"cp {original} {full} (the bytes before patching), then: hotfix.py revert"
                if os.path.isfile(original)
                else "reinstall this vLLM"
            ),
            state="mixed",
        )
    if parted.stock == data:
        return None
    check.compiles(path, parted.stock)
    if before.get(path) not in (None, sha256(parted.stock)):
        notes.append(f"{path} was changed outside our blocks since; that change stays")
    return FileChange(full, data, parted.stock)


def _overlay_root(record: receipt.Receipt | None, files: list[FileChange]) -> str | None:
    if record:
        return str(record["overlay"]["root"])
    from anchors.engine.plan import recorded_root

    return recorded_root([fences.split(change.before or b"") for change in files])


def _has_work(target: Target, job: Job) -> bool:
    return bool(
        job.files or job.trees or job.records or os.path.lexists(journal.journal_path(target.root))
    )


def _reverted(target: Target, job: Job, notes: tuple[str, ...], *, changed: bool) -> Report:
    result = report.blank()
    pending = bool(job.files) and not changed
    result.update(
        verb="revert",
        state="applied" if pending else "pristine",
        changed=changed,
        vllm={"root": target.root, "version": target.version},
        files=[
            {
                "path": os.path.relpath(change.path, target.root),
                "before": sha256(change.before or b""),
                "after": sha256(change.after or b""),
                "anchors": [],
            }
            for change in job.files
            if change.path.startswith(target.root + os.sep)
        ],
        caches=list(job.caches) if changed else [],
        notes=list(notes),
        summary="would be taken out" if pending else "this vLLM is as it was before the hotfix",
    )
    return result
