"""Tree -> verdicts: every anchor and every run-time requirement, also after a failure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from anchors.drift.trees import Tree
from anchors.engine import fences, native, platforms, requirements
from anchors.engine.locate import locate, may_be_absent
from anchors.engine.modules import unusable
from anchors.engine.reading import Reading
from anchors.engine.requirements import Requirement
from anchors.errors import HotfixError
from anchors.kit.anchor import Anchor, Drift, NotApplicable

APPLIES = "applies"
NOT_APPLICABLE = "not-applicable"
SUPERSEDED = "superseded"
DRIFTED = "drifted"
RUN_TIME = "run-time"


@dataclass(frozen=True)
class Finding:
    """One anchor (or `run-time`) in one tree. `expected` and `found` are set where it drifted.

    Findings of one `cause` say the same thing of the tree; "" is a cause of its own.
    """

    id: str
    file: str
    verdict: str
    detail: str = ""
    expected: str = ""
    found: str = ""
    cause: str = ""


@dataclass(frozen=True)
class Assessment:
    """One tree's verdicts; `error` where it could not be judged at all."""

    label: str
    findings: tuple[Finding, ...] = ()
    error: str = ""

    @property
    def verdict(self) -> str:
        """The tree's: drifted if anything did; superseded or not applicable if everything is; else
        applies."""
        verdicts = {finding.verdict for finding in self.findings}
        if self.error:
            return "error"
        if DRIFTED in verdicts:
            return DRIFTED
        whole = verdicts & {SUPERSEDED, NOT_APPLICABLE}
        return whole.pop() if len(verdicts) == 1 and whole else APPLIES


def assess(tree: Tree, anchors: tuple[Anchor, ...], needs: tuple[Requirement, ...]) -> Assessment:
    """Assess one tree. Never raises for what is in it."""
    if tree.root is None:
        return Assessment(tree.label, error=tree.error)
    try:
        return _assess(tree, tree.root, anchors, needs)
    except OSError as error:
        return Assessment(tree.label, error=f"cannot be read: {error}")
    except Exception as error:  # noqa: BLE001 (one odd tree never costs the report of others)
        words = f"{type(error).__name__}: {error}"
        return Assessment(tree.label, error=f"a fault of vision-exp, please report it: {words}")


def _assess(
    tree: Tree, root: Path, anchors: tuple[Anchor, ...], needs: tuple[Requirement, ...]
) -> Assessment:
    paths = dict.fromkeys(anchor.file for anchor in anchors)
    stock = {path: data for path in paths if (data := tree.read(path)) is not None}
    read = Reading(str(root), stock).read
    seen = native.assess(str(root), read, platforms.of(str(root)))
    if seen and seen.state in (SUPERSEDED, NOT_APPLICABLE):
        return Assessment(
            tree.label,
            tuple(
                Finding(id_, file, seen.state, seen.detail)
                for id_, file in [*((a.id, a.file) for a in anchors), (RUN_TIME, "")]
            ),
        )
    findings: list[Finding] = []
    for path in paths:
        own = tuple(anchor for anchor in anchors if anchor.file == path)
        findings += _file(tree, path, own, stock)
    drifted = any(finding.verdict == DRIFTED for finding in findings)
    if seen and not (drifted and seen.state == DRIFTED):  # what is gone says more
        foreign = seen.state == "foreign"
        wanted = "text-only sources" if foreign else "the classes that this hotfix patches"
        findings = [
            Finding(f.id, f.file, DRIFTED, seen.detail, wanted, seen.detail, seen.detail)
            for f in findings
        ]
    order = {anchor.id: place for place, anchor in enumerate(anchors)}
    findings.sort(key=lambda finding: order[finding.id])
    return Assessment(tree.label, (*findings, *_run_time(requirements.answer(needs, read))))


def _file(
    tree: Tree, path: str, anchors: tuple[Anchor, ...], stock: Mapping[str, bytes]
) -> list[Finding]:
    data = tree.read(path)
    if data is None:
        there = [other for other, text in stock.items() if text]
        if may_be_absent(anchors, tree.read(f"{native.PACKAGE}/__init__.py") or b"", there):
            why = "this release has no such file"
            return [Finding(a.id, path, NOT_APPLICABLE, why) for a in anchors]
        absent = ("the file is missing", f"the file {path}", "no such file", unusable(path))
        return [Finding(a.id, path, DRIFTED, *absent) for a in anchors]
    try:
        located = locate(path, fences.split(data).stock, anchors)
    except HotfixError as error:
        cause = error.message.removesuffix(" Nothing was changed.")
        broken = (cause, "a Python file", cause, unusable(path))
        return [Finding(a.id, path, DRIFTED, *broken) for a in anchors]
    return [_finding(anchor, outcome) for anchor, outcome in located.outcomes]


def _finding(anchor: Anchor, outcome: object) -> Finding:
    if isinstance(outcome, Drift):
        expected = f"exactly {outcome.expected} of: {outcome.fact}"
        return Finding(
            anchor.id, anchor.file, DRIFTED, str(outcome), expected, f"{outcome.found} of it"
        )
    if isinstance(outcome, NotApplicable):
        return Finding(anchor.id, anchor.file, NOT_APPLICABLE, str(outcome))
    return Finding(anchor.id, anchor.file, APPLIES)


def _run_time(needs: requirements.Answer) -> list[Finding]:
    if not needs.lost:
        detail = f"{needs.asked - len(needs.without)} names and signatures are there"
        return [Finding(RUN_TIME, "", APPLIES, "; ".join([detail, *requirements.notes(needs)]))]
    return [
        Finding(
            RUN_TIME,
            one.requirement.used_by,
            DRIFTED,
            one.need,
            one.requirement.text,
            one.found,
            one.cause,
        )
        for one in needs.lost
    ]
