"""One cause, one finding: a change of a tree that takes away several things is told once.

Findings belong together where they name the same cause, where the same lines of vLLM changed, or
where the overlay misses a name that a site misses, or anything of a file that is none. A renamed
class is missed by a site, and by each module of the overlay that uses a member of it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from anchors.drift.explain import MOST_CANDIDATES, Explanation
from anchors.drift.trees import Tree
from anchors.drift.verdict import DRIFTED, RUN_TIME, Finding
from anchors.engine.modules import unusable

#: One finding, or one tree, of the `--json` result.
Entry = dict[str, Any]
Good = dict[Finding, "tuple[Tree, str]"]


def entries(
    findings: tuple[Finding, ...],
    tree: Tree,
    good: Good,
    explain: Callable[[Finding, Tree, Tree | None], Explanation],
) -> list[Entry]:
    """Findings as `--json` has them, those that drifted one for each cause.

    `good` says where each last applied, and since which release not. `where` is the file of vLLM,
    `more` has what else the same cause took away.
    """
    listed: list[Entry] = []
    known: dict[tuple[str, ...], Entry] = {}
    for finding in findings:
        entry: Entry = asdict(finding)
        del entry["cause"]
        if finding.verdict != DRIFTED:
            listed.append(entry)
            continue
        cause = ("cause", finding.cause or f"{finding.id} {finding.expected}")
        same = known.get(cause)
        if same is not None and len(same["candidates"]) >= MOST_CANDIDATES:
            same["more"].append(entry)
            continue
        last, since = good.get(finding, (None, ""))
        why = explain(finding, tree, last)
        keys: list[tuple[str, ...]] = [("diff", why.diff)] if why.diff else []
        # What only sites are told of: names, or that the file is none.
        of_sites: list[tuple[str, ...]] = [("name", why.where, name) for name in why.names]
        if finding.id == RUN_TIME or finding.cause == unusable(why.where):
            of_sites.append(("file", why.where))
        sought = keys + (of_sites if finding.id == RUN_TIME else [])
        same = same or next((known[key] for key in sought if key in known), None)
        if same is None:
            same = {
                **entry,
                "where": why.where,
                "more": [],
                "candidates": list(why.candidates),
                "diff": why.diff,
                "since": since,
                "last_good": last.label if last else "",
                "next": _next(finding, tree),
            }
            listed.append(same)
            known.update(dict.fromkeys(keys + (of_sites if finding.id != RUN_TIME else []), same))
        else:
            same["more"].append(entry)
            every = dict.fromkeys([*same["candidates"], *why.candidates])
            same["candidates"] = list(every)[:MOST_CANDIDATES]
        known[cause] = same
    return listed


def parts(entry: Entry) -> list[Entry]:
    """A finding, and what else its cause took away."""
    return [entry, *entry.get("more", ())]


def columns(entry: Entry) -> list[str]:
    """The columns of the table that a finding stands for."""
    return list(dict.fromkeys(part["id"] for part in parts(entry)))


def row(tree: Entry) -> dict[str, str]:
    """Column -> verdict of a judged tree; a column drifted if any finding of it did."""
    found: dict[str, str] = {}
    for finding in tree["findings"]:
        for column in columns(finding):
            if found.get(column) != DRIFTED:
                found[column] = finding["verdict"]
    return found


def _next(finding: Finding, tree: Tree) -> str:
    where = "vision_exp/" + finding.file if finding.id == RUN_TIME else "anchors/sites/"
    again = f"python3 hotfix.py drift {shlex.quote(tree.label)}"
    return f"mend {where} as docs/new-release.md says, then: {again}"
