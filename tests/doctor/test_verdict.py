"""Verdicts and comparisons of nodes, decision by decision."""

from __future__ import annotations

import re
from typing import Any

import pytest

from anchors.doctor import log, manifest, verdict
from anchors.doctor.log import Agreement
from anchors.doctor.verdict import BROKEN, DEGRADED, OK, Finding


def evidence(pid: int, role: str, visibility: str = "bidirectional") -> str:
    return (
        f"INFO [vision-exp] active pid={pid} role={role} vllm=0.26.0 plan=9f overlay=aa "
        f"routing=bias_vl visibility={visibility} eps=1e-06\n"
    )


def test_each_field_of_the_evidence_counts() -> None:
    for field in ("vllm", "plan", "overlay", "routing", "visibility", "eps"):
        one = evidence(1, "A", visibility="causal reason=x")
        other = re.sub(rf"{field}=\S+", f"{field}=other", evidence(2, "B", visibility="causal"))
        found = log.read(one + other.replace("causal", "causal reason=x"))
        assert [each.split()[0] for each in found.differences] == [field]
        lacks = re.sub(rf"{field}=\S+ ?", "", evidence(2, "B"))
        assert any(
            f"{field} differs" in each for each in log.read(evidence(1, "A") + lacks).differences
        )
    reasons = (evidence(pid, "A", visibility=f"causal reason={pid}") for pid in (1, 2))
    assert log.read("".join(reasons)).differences == (
        "visibility differs: causal 1: A (pid 1); causal 2: A (pid 2)",
    )
    assert not log.read("").good


def test_the_worst_word_decides_and_every_reason_is_told() -> None:
    mild, bad = Finding(DEGRADED, "slow", "wait"), Finding(BROKEN, "dead", "restart")
    for findings in ([mild, bad, mild], [bad, mild]):
        found = verdict.judge("good", findings)
        assert (found.word, found.reason, found.next) == (BROKEN, "dead; slow", "restart")
        assert found.exit_code == 1
    assert verdict.judge("good", [mild]).exit_code == 1
    assert verdict.judge("good", []) == verdict.Verdict(OK, "good", "")
    assert verdict.judge("good", []).exit_code == 0


@pytest.mark.parametrize(
    ("value", "off"), [("1", True), ("True", True), (" 0 ", False), ("OFF", False), ("", False)]
)
def test_what_this_shell_switches_off(value: str, off: bool) -> None:
    assert bool(verdict.of_settings({"VISION_EXP_DISABLE": value})) is off
    assert verdict.of_settings({}) == []


def test_draft_lengths() -> None:
    assert verdict.of_draft_lengths((), "") and not verdict.of_draft_lengths((), "not known")
    assert not verdict.of_draft_lengths((3,), "")


@pytest.mark.parametrize(
    ("agreement", "plan", "words"),
    [
        (Agreement(("A",), ()), None, []),
        (Agreement((), ()), None, [BROKEN]),
        (Agreement(("A",), ("eps differs",)), None, [BROKEN]),
        (Agreement(("A",), (), plans=("abc",)), None, []),
        (Agreement(("A",), (), plans=("abc",)), "abcdef", []),
        (Agreement(("A",), (), plans=("abc",)), "abd", [BROKEN]),
        (Agreement(("A",), (), plans=("abc",)), "", [BROKEN]),
        (Agreement(("A",), (), troubles=("unseen",)), None, [BROKEN]),
        (Agreement(("A",), (), causal=("no kernel",)), None, [DEGRADED]),
    ],
)
def test_what_logs_say(agreement: Agreement, plan: str | None, words: list[str]) -> None:
    assert [one.word for one in verdict.of_logs(agreement, plan)] == words


def node(**changed: Any) -> dict[str, Any]:
    overlay = {"digest": changed.pop("overlay", "o")}
    files = changed.pop("files", {"a.py": "1", "b.py": "2"})
    report = {"state": "applied", "plan": "p", "overlay": overlay, **changed}
    report["files"] = [{"path": path, "after": after} for path, after in files.items()]
    report["vllm"] = {"version": changed.get("vllm", "0.29.0")}
    report["tool"] = {"version": changed.get("tool", "1")}
    return manifest.of(report)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, []),
        ({"tool": "2"}, ["tool: 1 here, 2 there"]),
        ({"vllm": "0.28.0"}, ["vllm: 0.29.0 here, 0.28.0 there"]),
        ({"state": "pristine"}, ["state: applied here, pristine there"]),
        ({"plan": "q"}, ["plan: p here, q there"]),
        ({"overlay": "u"}, ["overlay: o here, u there"]),
        ({"files": {"a.py": "1", "b.py": "3"}}, ["b.py: 2 here, 3 there"]),
        ({"files": {"a.py": "1"}}, ["b.py: 2 here, None there"]),
        ({"files": {"a.py": "1", "b.py": "2", "c.py": "3"}}, ["c.py: None here, 3 there"]),
    ],
)
def test_what_differs_between_nodes(changed: dict[str, Any], told: list[str]) -> None:
    assert manifest.differences(node(), node(**changed)) == told
