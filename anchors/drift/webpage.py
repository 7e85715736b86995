"""The result of `drift` as one HTML page without scripts or outside files."""

from __future__ import annotations

from html import escape

from anchors.drift import causes
from anchors.drift.pages import SHORT, Result, cell, drifted, every, facts, summary, tables, title
from anchors.drift.verdict import DRIFTED

#: Symbols tell states apart without colour, and are all that a phone shows of a cell.
_SYMBOL = {"applies": "✓", "n/a": "–", "native": "★", "DRIFTED": "✗"}

_STYLE = """
:root { color-scheme: light dark; --text: #1c1c1e; --ground: #fff; --line: #d0d0d5;
  --good: #d8f0dc; --native: #d9e7fb; --none: #ececf0; --bad: #fbd5d5; }
@media (prefers-color-scheme: dark) { :root { --text: #eee; --ground: #17181c; --line: #3a3b42;
  --good: #1d4a29; --native: #1d3a66; --none: #2a2b31; --bad: #6b1f1f; } }
body { font: 16px/1.5 system-ui, sans-serif; margin: 1rem; color: var(--text);
  background: var(--ground); overflow-wrap: anywhere; }
main { max-width: 72rem; margin: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { border: 1px solid var(--line); padding: .3rem; text-align: left; }
thead th { overflow-wrap: normal; vertical-align: bottom; }
thead th + th { writing-mode: vertical-rl; white-space: nowrap; }
caption { text-align: left; padding: .3rem 0; }
td.state { text-align: center; }
.word { display: block; font-size: .8rem; }
td.applies { background: var(--good); } td.native { background: var(--native); }
td.n-a { background: var(--none); } td.drifted, td.error { background: var(--bad); }
details { border: 1px solid var(--line); border-radius: .4rem; padding: .4rem .8rem;
  margin: .6rem 0; }
summary { cursor: pointer; }
:target { outline: 3px solid var(--text); outline-offset: 2px; }
pre { overflow-x: auto; background: var(--none); padding: .6rem; border-radius: .3rem; }
dt { font-weight: 600; } dd { margin: 0 0 .4rem; }
a { color: inherit; }
@media (max-width: 60rem) {
  thead th + th { padding: .5rem .1rem; }
  th, td { padding: .3rem .2rem; }
  td.state { min-width: 1.4rem; }
  .word { position: absolute; clip-path: inset(50%); width: 1px; height: 1px; overflow: hidden;
    white-space: nowrap; }
}
"""


def html(result: Result) -> str:
    """One page without scripts or outside files; what needs reading is open."""
    named = [(f"tree-{number}", entry) for number, entry in enumerate(every(result), 1)]
    of = {id(entry): name for name, entry in named}
    shown = "\n".join(
        _table(what, heads, [(of[id(row)], row) for row in rows])
        for what, heads, rows in tables(result)
    )
    details = "\n".join(_details(name, entry) for name, entry in named)
    notes = "".join(f"<p>{escape(note)}</p>" for note in result["notes"])
    tool = result["tool"]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>vLLM drift: {escape(summary(result))}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>Does it still fit?</h1>
<p>{escape(summary(result))}. Judged by {escape(tool["name"])} {escape(tool["version"])},
<time>{escape(result["date"])}</time>.</p>
{notes}{shown}
{_to_do(named)}<h2>Details</h2>
{details}
</main>
</body>
</html>
"""


def _to_do(named: list[tuple[str, Result]]) -> str:
    """Links to every finding and to every tree that could not be judged, with the next step."""
    items = [
        f'<li><a href="#{_finding(name, number)}">{escape(entry["tree"])}: '
        f"{escape(title(finding))}</a>: {escape(finding['next'])}</li>"
        for name, entry in named
        for number, finding in enumerate(drifted(entry), 1)
    ]
    items += [
        f'<li><a href="#{name}">{escape(entry["tree"])}</a>: {escape(entry["error"])}</li>'
        for name, entry in named
        if entry["error"]
    ]
    return f"<h2>Next</h2>\n<ul>{''.join(items)}</ul>\n" if items else ""


def _table(what: str, heads: list[str], rows: list[tuple[str, Result]]) -> str:
    signs = ", ".join(f"{sign} {word}" for word, sign in _SYMBOL.items())
    columns = "".join(f'<th scope="col">{head}</th>' for head in heads)
    body = "\n".join(_row(name, entry, heads) for name, entry in rows)
    return f"""<table>
<caption>{signs}. A ✗ leads to its finding.</caption>
<thead><tr><th scope="col">{what}</th>{columns}</tr></thead>
<tbody>
{body}
</tbody>
</table>"""


def _finding(name: str, number: int) -> str:
    return f"{name}-{number}"


def _row(name: str, entry: Result, heads: list[str]) -> str:
    head = f'<th scope="row"><a href="#{name}">{escape(entry["tree"])}</a></th>'
    if entry["error"]:
        return f'<tr>{head}<td class="error" colspan="{len(heads)}">not judged</td></tr>'
    return f"<tr>{head}{''.join(_cell(name, entry, column) for column in heads)}</tr>"


def _cell(name: str, entry: Result, column: str) -> str:
    word = cell(entry, column)
    shown = f'{_SYMBOL[word]}<span class="word"> {word}</span>'
    for number, finding in enumerate(drifted(entry), 1):
        if column in causes.columns(finding):
            shown = f'<a href="#{_finding(name, number)}">{shown}</a>'
            break
    return f'<td class="state {word.lower().replace("/", "-")}">{shown}</td>'


def _details(name: str, entry: Result) -> str:
    bad = bool(entry["error"] or drifted(entry))
    body = f"<p>{escape(entry['error'])}</p>" if entry["error"] else ""
    for number, finding in enumerate(drifted(entry), 1):
        shown = escape(finding["diff"])
        diff = f'<pre tabindex="0">{shown}</pre>' if shown else ""
        body += f'<h3 id="{_finding(name, number)}">{escape(title(finding))}</h3>'
        body += f"{_listed(facts(finding))}{diff}"
    others = [f for f in entry["findings"] if f["verdict"] != DRIFTED]
    body += _listed([(f"{f['id']}: {SHORT[f['verdict']]}", f["detail"]) for f in others])
    return (
        f'<details id="{name}"{" open" if bad else ""}>'
        f"<summary>{escape(entry['tree'])}: {escape(entry['verdict'])}</summary>{body}</details>"
    )


def _listed(pairs: list[tuple[str, str]]) -> str:
    """A list of terms; one that says several things has them one below the other."""
    items, last = "", None
    for name, text in pairs:
        items += "" if name == last else f"<dt>{escape(name)}</dt>"
        items += f"<dd>{escape(text)}</dd>"
        last = name
    return f"<dl>{items}</dl>" if items else ""
