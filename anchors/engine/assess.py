"""Target -> Judged: one state for the whole tree, with receipt, overlay and journal considered."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from anchors.cli import report
from anchors.cli.report import Report
from anchors.digests import file_digest, sha256
from anchors.engine import overlay, receipt
from anchors.engine.plan import Plan, make
from anchors.engine.target import Target
from anchors.errors import NO, REFUSED, HotfixError, refused
from anchors.sites import all_anchors
from anchors.writing import journal, lock

DONE_STATES = ("applied", "applied-unrecorded", "superseded")
_SETTLE_S = 0.05
_HINTS = {
    "drifted": "python3 hotfix.py -v status; then look for a newer vision-exp for this vLLM",
    "mixed": "python3 hotfix.py revert, then apply; if revert refuses too, reinstall vLLM",
    "edited": "python3 hotfix.py revert (edits outside our blocks stay), then apply",
    "foreign": "start from an image without the other vision code, or take it out, then apply",
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
    """A tree judged: the plan, its state with everything considered, the receipt."""

    plan: Plan
    state: str
    detail: str
    receipt: receipt.Receipt | None
    notes: tuple[str, ...]
    overlay_state: str

    @property
    def bytes_now(self) -> tuple[bytes | None, ...]:
        """The target files' bytes as they were when judged."""
        return tuple(file.current for file in self.plan.files)


def judge(target: Target, options: Options, *, trust_receipt: bool = True) -> Judged:
    """Target to state, without writing. Raises HotfixError for what cannot be judged.

    Without `trust_receipt` what it says of the bytes before patching counts for nothing.

    A refusal is only believed once nobody else is writing: files read in the middle of another
    run's renames look like a mixture.
    """
    judged = _judge_once(target, options, trust_receipt)
    lock_path = os.path.join(target.root, journal.STATE_FOLDER, "lock")
    deadline = time.monotonic() + lock.WAIT_S
    while judged.state in _HINTS and time.monotonic() < deadline:
        waited = lock.wait_for_holder(lock_path)
        if not waited and _unchanged(judged):
            break
        time.sleep(_SETTLE_S)
        judged = _judge_once(target, options, trust_receipt)
    return judged


def _judge_once(target: Target, options: Options, trust_receipt: bool) -> Judged:
    record, note = receipt.load(target.root)
    recorded_root = str(record["overlay"]["root"]) if record else None
    digest = overlay.source_digest()
    plan = make(
        target,
        all_anchors(),
        root=overlay.requested_root(options.overlay_root) or recorded_root,
        default_root=overlay.DEFAULT_ROOT,
        overlay=digest,
        before=receipt.stock_digests(record) if trust_receipt else None,
    )
    staged = overlay.state_of(plan.root, digest)
    state, detail = plan.state, plan.detail
    if state == "applied" and staged != "staged":
        state, detail = "stale", f"the overlay in {plan.root} is {staged}"
    elif state == "applied" and not _recorded(record, plan):
        state, detail = "applied-unrecorded", "applied, without a receipt that says so"
    if journal.load(target.root) is not None:
        state, detail = "interrupted", "an earlier run was interrupted; apply rolls it back first"
    notes = (*plan.notes, note) if note else plan.notes
    return Judged(plan, state, detail, record, notes, staged)


def _unchanged(judged: Judged) -> bool:
    root = judged.plan.target.root
    return all(
        file_digest(os.path.join(root, file.path))
        == (None if file.current is None else sha256(file.current))
        for file in judged.plan.files
    )


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
        overlay=None
        if judged.state == "superseded"
        else {"root": plan.root, "digest": plan.overlay, "state": judged.overlay_state},
        notes=list(judged.notes),
    )
    if judged.state in _HINTS:
        full["error"] = _refusal(judged).as_json()
    return full


@contextmanager
def answering() -> Iterator[None]:
    """For verbs that only tell: what apply refuses (exit 3) is a no of theirs (exit 1)."""
    try:
        yield
    except HotfixError as error:
        if error.exit_code == REFUSED:
            error.exit_code = NO
        raise


def refuse(judged: Judged) -> None:
    """Raises HotfixError (exit 3) where the tree is one that apply refuses."""
    if judged.state in _HINTS:
        error = _refusal(judged)
        error.report = as_report(judged, "")
        raise error


def refuse_partial(judged: Judged) -> None:
    """`--strict`: raises HotfixError (exit 3) where an edit site has no file in this release."""
    editing = {anchor.id for anchor in all_anchors() if anchor.render}
    for file in judged.plan.files:
        for anchor in file.anchors:
            if anchor.id in editing and anchor.state == "not-applicable":
                raise refused(
                    "strict",
                    f"{anchor.id} is not applicable ({anchor.detail}) and --strict was given. "
                    "Nothing was changed.",
                    hint="leave --strict out to go without it",
                    state="not-applicable",
                )


def _refusal(judged: Judged) -> HotfixError:
    version = judged.plan.target.version or "of unknown version"
    return refused(
        judged.state,
        f"vLLM {version} is {judged.state}: {judged.detail or judged.state}. Nothing was changed.",
        hint=_HINTS[judged.state],
        state=judged.state,
    )
