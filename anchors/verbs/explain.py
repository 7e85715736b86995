"""list and explain: what the sites say about themselves."""

from __future__ import annotations

import argparse
import difflib
from dataclasses import asdict

from anchors import report
from anchors.errors import USAGE, HotfixError
from anchors.kit.anchor import APPLIES, Anchor
from anchors.report import Report
from anchors.sites import all_anchors

_SHOWN = ("id", "file", "where", "what", "why", "until", "upstream")


def run(arguments: argparse.Namespace) -> Report:
    """`list`, or `explain ID`."""
    result = report.blank()
    result["verb"] = arguments.verb
    chosen = all_anchors() if arguments.verb == "list" else (_named(arguments.id),)
    result["anchors"] = [{name: getattr(a, name) for name in _SHOWN} for a in chosen]
    if arguments.verb == "list":
        listed = "".join(f"{a.id:<18} {a.file}\n{'':<18} {a.what}\n" for a in chosen)
        result["text"] = f"{'site':<18} file in vllm/, and what is done there\n{listed}"
    else:
        result["anchors"][0]["cases"] = [asdict(case) for case in chosen[0].cases]
        result["text"] = _explained(chosen[0])
    return result


def _named(anchor_id: str) -> Anchor:
    known = {anchor.id: anchor for anchor in all_anchors()}
    if anchor_id in known:
        return known[anchor_id]
    near = difflib.get_close_matches(anchor_id, known, n=1)
    raise HotfixError(
        "unknown-anchor",
        f"there is no site {anchor_id!r}. Nothing was changed.",
        exit_code=USAGE,
        context=tuple(known),
        hint=f"python3 hotfix.py explain {near[0]}" if near else "python3 hotfix.py list",
    )


def _explained(anchor: Anchor) -> str:
    lines = [f"{name:<9} {getattr(anchor, name)}" for name in _SHOWN]
    lines.append("cases, what apply makes of a file like each of them")
    for case in anchor.cases:
        lines.append(
            f"  {case.outcome}" + (f", in front of `{case.before}`" if case.before else "")
        )
    if anchor.render:
        lines += ["example, what apply adds to the first of them", *_example(anchor)]
    return "\n".join(lines) + "\n"


def _example(anchor: Anchor) -> list[str]:
    from anchors.engine import cases

    case = next(case for case in anchor.cases if case.outcome == APPLIES)
    _, after = cases.run(anchor, case.source)
    return list(
        difflib.unified_diff(
            case.source.splitlines(), after.splitlines(), "before", "after", lineterm="", n=2
        )
    )
