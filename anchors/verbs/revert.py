"""revert: takes blocks, overlay and records out again, without LibCST and without a receipt."""

from __future__ import annotations

import os
from dataclasses import dataclass

from anchors.cli import report
from anchors.cli.report import Report
from anchors.digests import sha256
from anchors.engine import caches, fences, native, overlay, prove, receipt
from anchors.engine.assess import Options
from anchors.engine.plan import recorded_root, refuse_newer
from anchors.engine.target import Target
from anchors.errors import refused
from anchors.sites import all_anchors
from anchors.verbs.apply import existing
from anchors.verbs.session import writing
from anchors.writing import journal, preflight
from anchors.writing.effects import Effects
from anchors.writing.transaction import FileChange, Job, commit


def revert(target: Target, options: Options, effects: Effects) -> Report:
    """Reverts; idempotent. Raises HotfixError with the exit code of the table."""
    interrupted = journal.load(target.root) is not None
    stripped = _stripped(target.root, options)
    job, notes = _job(target, stripped)
    verdict = _verdict(target.root, stripped.stock)
    if options.dry_run or not (interrupted or _has_work(job)):
        return _result(target, job, notes, verdict, changed=False)
    preflight.check(job)
    with writing(target, effects) as session:
        where = _stripped(target.root, options).overlay_root
        session.hold([where] if os.path.isdir(where) else [])
        job, notes = _job(target, _stripped(target.root, options))
        if _has_work(job):
            preflight.check(job)
            commit(job, effects)
    return _result(target, job, (*notes, *session.notes), verdict, changed=True)


def _has_work(job: Job) -> bool:
    state = os.path.join(job.root, journal.STATE_FOLDER)
    return bool(job.files or job.trees or job.records or os.path.isdir(state))


@dataclass(frozen=True)
class _Stripped:
    """What taking our blocks out means: files that change, notes, where the overlay is.

    `stock` holds every target file without our blocks.
    """

    files: tuple[FileChange, ...]
    stock: dict[str, bytes]
    notes: tuple[str, ...]
    overlay_root: str


def _stripped(root: str, options: Options) -> _Stripped:
    record, note = receipt.load(root)
    notes = [note] if note else []
    before = receipt.stock_digests(record) or {}
    files = []
    stock: dict[str, bytes] = {}
    for path in dict.fromkeys(anchor.file for anchor in all_anchors()):
        change = _without_blocks(root, path, before, notes, stock)
        if change:
            files.append(change)
    return _Stripped(tuple(files), stock, tuple(notes), _overlay_root(record, files, options))


def _job(target: Target, stripped: _Stripped) -> tuple[Job, tuple[str, ...]]:
    root = target.root
    work = overlay.removal(stripped.overlay_root, root)
    originals = os.path.join(root, journal.STATE_FOLDER, "originals")
    records = [receipt.receipt_path(root)]
    if os.path.isdir(originals):
        records += [os.path.join(originals, name) for name in sorted(os.listdir(originals))]
    changed = [os.path.relpath(change.path, root) for change in stripped.files]
    job = Job(
        root=root,
        files=(*stripped.files, *work.files),
        trees=work.trees,
        caches=tuple(caches.stale(root, changed, compiled=True)) if changed else (),
        records=tuple(existing(path, None) for path in records if os.path.exists(path)),
        empty=(originals, *work.empty),
    )
    return job, (*stripped.notes, *work.notes)


def _without_blocks(
    root: str, path: str, before: dict[str, str], notes: list[str], stock: dict[str, bytes]
) -> FileChange | None:
    full = os.path.join(root, path)
    if not os.path.isfile(full):
        if path in before:
            notes.append(f"{path} is no longer a file: nothing was taken out of it; reinstall vLLM")
        return None
    with open(full, "rb") as file:
        data = file.read()
    parted = fences.split(data)
    if parted.broken:
        raise refused(
            "mixed",
            f"{path}: {parted.broken}. Our blocks cannot be told apart. Nothing was changed.",
            hint=_way_out(root, path),
            state="mixed",
        )
    refuse_newer({path: parted})
    stock[path] = parted.stock
    if parted.stock == data:
        return None
    prove.compiles(path, parted.stock)
    if before.get(path) not in (None, sha256(parted.stock)):
        notes.append(f"{path} was changed outside our blocks since; that change stays")
    return FileChange(full, data, parted.stock)


def _way_out(root: str, path: str) -> str:
    original = os.path.join(root, journal.STATE_FOLDER, "originals", path.replace("/", "__"))
    if os.path.isfile(original):
        return f"cp {original} {os.path.join(root, path)} (as before patching), then revert again"
    return "reinstall this vLLM"


def _overlay_root(record: receipt.Receipt | None, files: list[FileChange], options: Options) -> str:
    if record:
        return str(record["overlay"]["root"])
    found = recorded_root(fences.split(change.before or b"") for change in files)
    return found or overlay.requested_root(options.overlay_root) or overlay.DEFAULT_ROOT


def _verdict(root: str, stock: dict[str, bytes]) -> native.Verdict | None:
    """Whether the vLLM has vision code besides ours, and whose; only the words depend on it."""
    try:
        return native.judge(root, stock)
    except OSError:
        return None  # a file that revert does not write need not be readable


def _result(
    target: Target,
    job: Job,
    notes: tuple[str, ...],
    verdict: native.Verdict | None,
    *,
    changed: bool,
) -> Report:
    result = report.blank()
    pending = _has_work(job) and not changed
    inside = [change for change in job.files if change.path.startswith(target.root + os.sep)]
    without = verdict.state if verdict else "pristine"
    result.update(
        verb="revert",
        state="applied" if pending and inside else without,
        detail=verdict.detail if verdict else "",
        changed=changed,
        vllm={"root": target.root, "version": target.version},
        files=[
            {
                "path": os.path.relpath(change.path, target.root),
                "before": sha256(change.before or b""),
                "after": sha256(change.after or b""),
                "anchors": [],
            }
            for change in inside
        ],
        caches=list(job.caches) if changed else [],
        notes=list(notes),
        summary=_summary(without, pending=pending, changed=changed),
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
