"""Target -> Assessment: one state for the whole tree, with receipt, overlay, journal considered."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from anchors import report
from anchors.digests import file_digest, sha256
from anchors.engine import overlay, platforms, receipt
from anchors.engine.overlay import Package
from anchors.engine.plan import Plan, make
from anchors.engine.target import Target, shadow
from anchors.errors import NO, REFUSED, HotfixError, refused
from anchors.report import Report
from anchors.sites import all_anchors
from anchors.writing import journal, lock, state

DONE_STATES = ("applied", "applied-unrecorded", "superseded")
_WRITING_STATES = ("pristine", "outdated", "stale", "applied-unrecorded")
_PAUSE_S = 0.05
_HINTS = {
    "drifted": "python3 hotfix.py -v status; then look for a newer vision-exp for this vLLM",
    "mixed": "python3 hotfix.py revert, then apply; if revert refuses too, reinstall vLLM",
    "edited": "python3 hotfix.py revert (edits outside our blocks stay), then apply",
    "foreign": "start from an image without the other vision code, or take it out, then apply",
    "missing": "reinstall this vLLM",
    "not-applicable": "use vLLM 0.22.0 or later, built for NVIDIA or AMD GPUs",
}


@dataclass(frozen=True)
class Assessment:
    """A tree assessed: its plan, and its state with everything considered."""

    plan: Plan
    state: str
    detail: str
    notes: tuple[str, ...]
    overlay_state: str

    @property
    def needs_writing(self) -> bool:
        """Whether apply carries the plan out; an interrupted tree is rolled back before that."""
        return self.state in _WRITING_STATES


def assess(
    target: Target, package: Package, overlay_root: str | None, *, trust_receipt: bool = True
) -> Assessment:
    """Target to state, without writing. Raises HotfixError for what cannot be assessed.

    `overlay_root` is the one asked for, None where the one in use is meant. Without
    `trust_receipt` what the receipt says of the bytes before patching counts for nothing.

    A refusal is only believed once nobody else is writing: files read in the middle of another
    run's renames look like a mixture.
    """
    found = _assess_once(target, package, overlay_root, trust_receipt)
    deadline = time.monotonic() + lock.WAIT_S
    while found.state in _HINTS and time.monotonic() < deadline:
        waited = lock.wait_for_holder(state.lock_path(target.root))
        if not waited and _is_unchanged(found.plan):
            break
        time.sleep(_PAUSE_S)
        found = _assess_once(target, package, overlay_root, trust_receipt)
    return found


def _assess_once(
    target: Target, package: Package, overlay_root: str | None, trust_receipt: bool
) -> Assessment:
    former, note = receipt.load(target.root)
    recorded_root = former.overlay_root if former else None
    plan = make(
        target,
        all_anchors(),
        package,
        overlay_root=overlay_root or recorded_root,
        former=former,
        trust_receipt=trust_receipt,
    )
    staged = overlay.state_of(plan.overlay_root, target.root, package.digest)
    found, detail = plan.state, plan.detail
    if found == "applied" and staged != "staged":
        found, detail = "stale", f"the overlay in {plan.overlay_root} is {staged}"
    elif found == "applied" and not _is_recorded(plan):
        found, detail = "applied-unrecorded", "applied, without a receipt that says so"
    if journal.load(target.root) is not None:
        found, detail = "interrupted", "an earlier run was interrupted; apply rolls it back first"
    notes = (*plan.notes, note) if note else plan.notes
    if other := shadow(target.root):
        notes += (
            f"{other} is another vLLM: `python3 -m` imports that one in this folder, not the one "
            "described here; start the server in another folder",
        )
    return Assessment(plan, found, detail, notes, staged)


def _is_unchanged(plan: Plan) -> bool:
    return all(
        file_digest(os.path.join(plan.target.root, file.path))
        == (None if file.current is None else sha256(file.current))
        for file in plan.files
    )


def _is_recorded(plan: Plan) -> bool:
    if plan.former is None or plan.former.plan != plan.digest:
        return False
    if (plan.former.judged, plan.former.platform) != (plan.judged, plan.platform):
        return False
    after = plan.former.after
    return all(after.get(f.path) == (sha256(f.after) if f.after else None) for f in plan.files)


def as_report(assessment: Assessment, verb: str) -> Report:
    """The `--json` object for an assessed tree."""
    plan = assessment.plan
    full = report.blank()
    full.update(
        verb=verb,
        state=assessment.state,
        detail=assessment.detail,
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
        notes=list(assessment.notes),
    )
    if plan.overlay and assessment.state != "superseded":
        full["overlay"] = {
            "root": plan.overlay_root,
            "digest": plan.overlay.digest,
            "state": assessment.overlay_state,
        }
    if assessment.state in _HINTS:
        full["error"] = _refusal(assessment).as_json()
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


def refuse(assessment: Assessment) -> None:
    """Raises HotfixError (exit 3) where the tree is one that apply refuses."""
    if assessment.state in _HINTS:
        error = _refusal(assessment)
        error.report = as_report(assessment, "")
        raise error


def refuse_partial(assessment: Assessment) -> None:
    """`--strict`: raises HotfixError (exit 3) where an edit site has no file in this release."""
    editing = {anchor.id for anchor in all_anchors() if anchor.render}
    for file in assessment.plan.files:
        for anchor in file.anchors:
            here = platforms.imports(assessment.plan.platform, file.path)
            if here and anchor.id in editing and anchor.state == "not-applicable":
                raise refused(
                    "strict",
                    f"{anchor.id} is not applicable ({anchor.detail}) and --strict was given. "
                    "Nothing was changed.",
                    hint="leave --strict out to go without it",
                    state="not-applicable",
                )


def _refusal(assessment: Assessment) -> HotfixError:
    version = assessment.plan.target.version or "of unknown version"
    found, detail = assessment.state, assessment.detail
    return refused(
        found,
        f"vLLM {version} is {found}: {detail or found}. Nothing was changed.",
        hint=_HINTS[found],
        state=found,
    )
