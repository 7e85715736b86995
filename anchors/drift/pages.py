"""The result of `drift` as text: a table for the terminal, Markdown for an issue."""

from __future__ import annotations

import shutil
import sys
from typing import Any

from anchors.drift import causes
from anchors.drift.kernels import COLUMN
from anchors.drift.verdict import APPLIES, DRIFTED, NOT_APPLICABLE, RUN_TIME, SUPERSEDED

PREFIX = "[vision-exp]"
#: The table's words.
SHORT = {APPLIES: "applies", NOT_APPLICABLE: "n/a", SUPERSEDED: "native", DRIFTED: "DRIFTED"}
#: Lines of one kind in a finding that a report shows.
_MOST_LINES = 5

Result = dict[str, Any]


def tables(result: Result) -> list[tuple[str, list[str], list[Result]]]:
    """(what, columns, rows): vLLM with its sites and run-time needs, FlashInfer with its table."""
    parts = [("tree", [*result["anchors"], RUN_TIME], result["trees"])]
    parts.append(("flashinfer", [COLUMN], result.get("flashinfer", [])))
    return [part for part in parts if part[2]]


def every(result: Result) -> list[Result]:
    """The rows of all tables."""
    return [entry for _, _, rows in tables(result) for entry in rows]


def cell(entry: Result, column: str) -> str:
    """One word for a tree and a column; empty where the tree could not be judged."""
    state = causes.row(entry).get(column)
    return SHORT[state] if state else ""


def drifted(entry: Result) -> list[Result]:
    """The findings of a tree that have drifted."""
    return [f for f in entry["findings"] if f["verdict"] == DRIFTED]


def summary(result: Result) -> str:
    """One sentence that counts trees by verdict."""
    counts: dict[str, int] = {}
    for entry in every(result):
        counts[entry["verdict"]] = counts.get(entry["verdict"], 0) + 1
    words = {
        APPLIES: "fit",
        SUPERSEDED: "serve the model natively",
        NOT_APPLICABLE: "are not concerned",
        DRIFTED: "have drifted",
        "error": "could not be judged",
    }
    counted = [f"{counts[key]} {text}" for key, text in words.items() if key in counts]
    return f"{len(every(result))} trees: {', '.join(counted) or 'none'}"


def terminal(result: Result) -> str:
    """The table and, below it, what drifted and why."""
    lines: list[str] = []
    for what, heads, rows in tables(result):
        width = max(len(name) for name in (what, *(row["tree"] for row in rows)))
        head = f"{what:<{width}}  " + "  ".join(heads)
        if sys.stdout.isatty() and len(head) > shutil.get_terminal_size().columns:
            lines += [f"{row['tree']}: {_in_words(row)}" for row in rows]
            continue
        lines.append(head)
        for row in rows:
            cells = "  ".join(f"{cell(row, head):<{len(head)}}" for head in heads)
            lines.append(f"{row['tree']:<{width}}  {row['error'] or cells}".rstrip())
    for entry in every(result):
        for finding in drifted(entry):
            lines += ["", f"{PREFIX} {entry['tree']}: {title(finding)} drifted"]
            lines += [f"  {name:<9} {text}" for name, text in facts(finding)]
            lines += [f"  {line}" for line in finding["diff"].splitlines()]
    lines += [f"{PREFIX} note: {note}" for note in result["notes"]]
    lines.append(f"{PREFIX} {summary(result)}")
    return "\n".join(lines) + "\n"


def _in_words(entry: Result) -> str:
    """A tree's row where the table is wider than the terminal: the columns that drifted."""
    if entry["error"] or entry["verdict"] != DRIFTED:
        return str(entry["error"] or SHORT[entry["verdict"]])
    bad = [column for column, state in causes.row(entry).items() if state == DRIFTED]
    return f"{SHORT[DRIFTED]}: {', '.join(bad)}"


def title(finding: Result) -> str:
    """The columns that a finding stands for, as people read them."""
    return ", ".join(causes.columns(finding))


def facts(finding: Result) -> list[tuple[str, str]]:
    """(label, text) of a finding in the order in which people read it; the diff comes after."""
    parts = causes.parts(finding)
    found = [("file", finding.get("where") or finding["file"])]
    for name in ("expected", "found"):
        found += _some(name, [part[name] for part in parts])
    found += _some("needed by", [f"vision_exp/{p['file']}" for p in parts if p["id"] == RUN_TIME])
    found += [("nearest", candidate) for candidate in finding["candidates"]]
    if finding["since"]:
        found.append(("since", f"{finding['since']} (applied in {finding['last_good']})"))
    if finding.get("next"):
        found.append(("next", finding["next"]))
    return found


def _some(name: str, texts: list[str]) -> list[tuple[str, str]]:
    """Each text once, and no more of them than a person reads."""
    each = list(dict.fromkeys(texts))
    rest = len(each) - _MOST_LINES
    shown = each if rest <= 0 else [*each[:_MOST_LINES], f"and {rest} more, which --json lists"]
    return [(name, text) for text in shown]


def markdown(result: Result) -> str:
    """For a pull request or an issue."""
    lines = [f"# vLLM drift: {summary(result)}", ""]
    lines += [f"Judged {result['date']}.", ""] if result.get("date") else []
    for what, heads, rows in tables(result):
        lines += [f"| {what} | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
        for row in rows:
            cells = [cell(row, head) for head in heads]
            if row["error"]:
                cells[0] = _inline(row["error"])
            lines.append(f"| {row['tree']} | {' | '.join(cells)} |")
        lines.append("")
    del lines[-1:]
    for entry in every(result):
        for finding in drifted(entry):
            lines += ["", f"## {entry['tree']}: {title(finding)}", ""]
            lines.append(finding_markdown(finding))
    lines += ["", *(f"- note: {note}" for note in result["notes"])] if result["notes"] else []
    return "\n".join(lines) + "\n"


def finding_markdown(finding: Result) -> str:
    """What drifted, as a Markdown list and a diff; also the body of an issue."""
    lines = [f"- {name}: {_inline(text)}" for name, text in facts(finding)]
    if finding["diff"]:
        lines += ["", "````diff", finding["diff"], "````"]
    return "\n".join(lines)


def _inline(text: str) -> str:
    """Text that Markdown leaves alone, also in a table."""
    return "`" + text.replace("`", "'").replace("|", "\\|").replace("\n", " ") + "`"
