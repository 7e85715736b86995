"""The result of `drift` for people: terminal table, Markdown, one self-contained HTML page."""

from __future__ import annotations

from html import escape
from typing import Any

from anchors.drift.verdict import APPLIES, DRIFTED, NOT_APPLICABLE, RUN_TIME, SUPERSEDED

PREFIX = "[vision-exp]"
_SHORT = {APPLIES: "applies", NOT_APPLICABLE: "n/a", SUPERSEDED: "native", DRIFTED: "DRIFTED"}

Result = dict[str, Any]


def columns(result: Result) -> list[str]:
    """Anchor ids, then the run-time requirements."""
    return [*result["anchors"], RUN_TIME]


def cell(entry: Result, column: str) -> str:
    """One word for a tree and a column; empty where the tree could not be judged."""
    states = {f["verdict"] for f in entry["findings"] if f["id"] == column}
    if not states:
        return ""
    return _SHORT[DRIFTED] if DRIFTED in states else _SHORT[states.pop()]


def drifted(entry: Result) -> list[Result]:
    """The findings of a tree that have drifted."""
    return [f for f in entry["findings"] if f["verdict"] == DRIFTED]


def summary(result: Result) -> str:
    """One sentence that counts trees by verdict."""
    counts: dict[str, int] = {}
    for entry in result["trees"]:
        counts[entry["verdict"]] = counts.get(entry["verdict"], 0) + 1
    words = {
        APPLIES: "fit",
        SUPERSEDED: "serve the model natively",
        DRIFTED: "have drifted",
        "error": "could not be judged",
    }
    told = [f"{counts[key]} {text}" for key, text in words.items() if key in counts]
    return f"{len(result['trees'])} trees: {', '.join(told) or 'none'}"


def terminal(result: Result) -> str:
    """The table and, below it, what drifted and why."""
    heads = columns(result)
    width = max([len(entry["tree"]) for entry in result["trees"]] + [4])
    lines = [f"{'tree':<{width}}  " + "  ".join(heads)]
    for entry in result["trees"]:
        cells = "  ".join(f"{cell(entry, head):<{len(head)}}" for head in heads)
        lines.append(f"{entry['tree']:<{width}}  {entry['error'] or cells}".rstrip())
    for entry in result["trees"]:
        for finding in drifted(entry):
            lines += ["", f"{PREFIX} {entry['tree']}: {finding['id']} drifted", *_facts(finding)]
    lines += [f"{PREFIX} note: {note}" for note in result["notes"]]
    lines.append(f"{PREFIX} {summary(result)}")
    return "\n".join(lines) + "\n"


def _facts(finding: Result) -> list[str]:
    lines = [
        f"  file      {finding['file']}",
        f"  expected  {finding['expected']}",
        f"  found     {finding['found']}",
    ]
    lines += [f"  nearest   {candidate}" for candidate in finding["candidates"]]
    if finding["since"]:
        lines.append(f"  since     {finding['since']} (applied in {finding['last_good']})")
    lines += [f"  {line}" for line in finding["diff"].splitlines()]
    return lines


def markdown(result: Result) -> str:
    """For a pull request or an issue."""
    heads = columns(result)
    lines = [f"# vLLM drift: {summary(result)}", ""]
    lines += [f"| tree | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for entry in result["trees"]:
        cells = [cell(entry, head) for head in heads]
        if entry["error"]:
            cells[0] = _inline(entry["error"])
        lines.append(f"| {entry['tree']} | {' | '.join(cells)} |")
    for entry in result["trees"]:
        for finding in drifted(entry):
            lines += ["", f"## {entry['tree']}: {finding['id']}", "", finding_markdown(finding)]
    lines += ["", *(f"- note: {note}" for note in result["notes"])] if result["notes"] else []
    return "\n".join(lines) + "\n"


def finding_markdown(finding: Result) -> str:
    """What drifted, as a Markdown list and a diff; also the body of an issue."""
    lines = [
        f"- file: {_inline(finding['file'])}",
        f"- expected: {_inline(finding['expected'])}",
        f"- found: {_inline(finding['found'])}",
        *(f"- nearest: {_inline(candidate)}" for candidate in finding["candidates"]),
    ]
    if finding["since"]:
        lines.append(f"- since {finding['since']}, applied in {finding['last_good']}")
    if finding["diff"]:
        lines += ["", "````diff", finding["diff"], "````"]
    return "\n".join(lines)


def _inline(text: str) -> str:
    """Text that Markdown leaves alone, also in a table."""
    return "`" + text.replace("`", "'").replace("|", "\\|").replace("\n", " ") + "`"


_STYLE = """
:root { color-scheme: light dark; --text: #1c1c1e; --ground: #fff; --line: #d0d0d5;
  --good: #d8f0dc; --native: #d9e7fb; --none: #ececf0; --bad: #fbd5d5; }
@media (prefers-color-scheme: dark) { :root { --text: #eee; --ground: #17181c; --line: #3a3b42;
  --good: #1d4a29; --native: #1d3a66; --none: #2a2b31; --bad: #6b1f1f; } }
body { font: 16px/1.5 system-ui, sans-serif; margin: 1rem; color: var(--text);
  background: var(--ground); }
main { max-width: 72rem; margin: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; white-space: nowrap; font-size: .9rem; }
th, td { border: 1px solid var(--line); padding: .3rem .6rem; text-align: left; }
tbody th { position: sticky; left: 0; background: var(--ground); }
td.applies { background: var(--good); } td.native { background: var(--native); }
td.n-a { background: var(--none); } td.drifted, td.error { background: var(--bad); }
details { border: 1px solid var(--line); border-radius: .4rem; padding: .4rem .8rem;
  margin: .6rem 0; }
summary { cursor: pointer; }
pre { overflow-x: auto; background: var(--none); padding: .6rem; border-radius: .3rem; }
dt { font-weight: 600; } dd { margin: 0 0 .4rem; overflow-wrap: anywhere; }
a { color: inherit; }
"""


def html(result: Result) -> str:
    """One page without scripts or outside files; details open on a click."""
    heads = columns(result)
    rows = "\n".join(_row(entry, heads) for entry in result["trees"])
    details = "\n".join(_details(entry, heads) for entry in result["trees"])
    notes = "".join(f"<p>{escape(note)}</p>" for note in result["notes"])
    tool = result["tool"]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>vLLM drift</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>Does it still fit?</h1>
<p>{escape(summary(result))}. Judged by {escape(tool["name"])} {escape(tool["version"])}.</p>
{notes}
<div class="wide"><table>
<thead><tr><th scope="col">tree</th>{"".join(f'<th scope="col">{h}</th>' for h in heads)}</tr>
</thead>
<tbody>
{rows}
</tbody>
</table></div>
<h2>Details</h2>
{details}
</main>
</body>
</html>
"""


def _identifier(entry: Result) -> str:
    return "tree-" + "".join(c if c.isalnum() else "-" for c in entry["tree"])


def _row(entry: Result, heads: list[str]) -> str:
    name = f'<th scope="row"><a href="#{_identifier(entry)}">{escape(entry["tree"])}</a></th>'
    if entry["error"]:
        return f'<tr>{name}<td class="error" colspan="{len(heads)}">not judged</td></tr>'
    words = [cell(entry, head) for head in heads]
    cells = "".join(
        f'<td class="{word.lower().replace("/", "-")}">{_SYMBOL[word]} {word}</td>'
        for word in words
    )
    return f"<tr>{name}{cells}</tr>"


# Told apart without colour: a sign as well as a word.
_SYMBOL = {"applies": "✓", "n/a": "–", "native": "★", "DRIFTED": "✗"}


def _details(entry: Result, heads: list[str]) -> str:
    bad = bool(entry["error"] or drifted(entry))
    body = f"<p>{escape(entry['error'])}</p>" if entry["error"] else ""
    for finding in drifted(entry):
        facts = [("file", finding["file"]), ("expected", finding["expected"])]
        facts += [("found", finding["found"])]
        facts += [("nearest", candidate) for candidate in finding["candidates"]]
        if finding["since"]:
            facts.append(("since", f"{finding['since']}, applied in {finding['last_good']}"))
        listed = "".join(f"<dt>{k}</dt><dd>{escape(v)}</dd>" for k, v in facts)
        diff = f"<pre>{escape(finding['diff'])}</pre>" if finding["diff"] else ""
        body += f"<h3>{escape(finding['id'])}</h3><dl>{listed}</dl>{diff}"
    others = [f for f in entry["findings"] if f["verdict"] != DRIFTED]
    listed = "".join(
        f"<dt>{escape(f['id'])}: {_SHORT[f['verdict']]}</dt><dd>{escape(f['detail'])}</dd>"
        for f in others
    )
    body += f"<dl>{listed}</dl>" if listed else ""
    return (
        f'<details id="{_identifier(entry)}"{" open" if bad else ""}>'
        f"<summary>{escape(entry['tree'])}: {escape(entry['verdict'])}</summary>{body}</details>"
    )
