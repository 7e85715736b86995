"""Doctor's verdict: OK, DEGRADED or BROKEN, why, and what to type next."""

from __future__ import annotations

from dataclasses import dataclass

from anchors.doctor.log import Agreement
from anchors.engine.assess import DONE_STATES
from anchors.errors import DONE, NO

OK, DEGRADED, BROKEN = "OK", "DEGRADED", "BROKEN"
_RANK = (OK, DEGRADED, BROKEN)
_TROUBLE = "docs/troubleshooting.md, and the log around the lines above"


@dataclass(frozen=True)
class Finding:
    """One reason for a verdict, and what helps."""

    word: str
    reason: str
    next: str = ""


@dataclass(frozen=True)
class Verdict:
    """The worst word of all findings, their reasons, and the first helpful step of the worst."""

    word: str
    reason: str
    next: str

    @property
    def exit_code(self) -> int:
        return DONE if self.word == OK else NO


def judge(good: str, findings: list[Finding]) -> Verdict:
    """``good``: what to say where nothing was found."""
    if not findings:
        return Verdict(OK, good, "")
    ordered = sorted(findings, key=lambda finding: -_RANK.index(finding.word))
    reasons = "; ".join(dict.fromkeys(finding.reason for finding in ordered))
    return Verdict(ordered[0].word, reasons, ordered[0].next)


def of_tree(state: str, detail: str, hint: str) -> list[Finding]:
    """What is wrong with an installation in this state."""
    if state in DONE_STATES:
        return []
    return [Finding(BROKEN, f"image input is not in place: {detail or state}", hint)]


def of_draft_lengths(legal: tuple[int, ...], reason: str) -> list[Finding]:
    """``legal``: the k that this vLLM's DSpark takes; ``reason``: why they are not known."""
    if legal or reason:
        return []
    return [Finding(DEGRADED, "no draft length is possible with DSpark", "serve without drafting")]


def of_settings(environment: dict[str, str]) -> list[Finding]:
    """What this shell's environment would switch off in a server that it starts."""
    off = environment.get("VISION_EXP_DISABLE", "").strip().lower()
    if off in ("", "0", "false", "no", "off"):
        return []
    return [Finding(BROKEN, "VISION_EXP_DISABLE turns image input off", "unset VISION_EXP_DISABLE")]


def of_logs(agreement: Agreement, plan: str | None) -> list[Finding]:
    """What the servers' logs say. ``plan``: this tree's; None where there is none to compare."""
    if not agreement.processes:
        return [
            Finding(
                BROKEN,
                "no evidence line: no process of this server built a vision model or processor",
                "python3 hotfix.py status, in that server's container; then start it again",
            )
        ]
    again = "bash run.sh in every container, then start the server again"
    findings = [Finding(BROKEN, each, again) for each in agreement.differences]
    others = [each for each in agreement.plans if plan is not None and not plan.startswith(each)]
    if others:
        words = f"the log is of another plan than this tree's: {', '.join(others)}"
        findings.append(Finding(BROKEN, words, again))
    findings += [Finding(BROKEN, each, _TROUBLE) for each in agreement.troubles]
    findings += [
        Finding(DEGRADED, f"image tokens are causal: {reason}", "docs/machines.md")
        for reason in agreement.causal
    ]
    return findings
