"""Open or update one issue per drifted anchor and release: `drift_issues.py drift.json`.

Uses the `gh` command, which reads GH_TOKEN and GH_REPO. A comment is added only when the finding
changed, so a daily run does not repeat itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from anchors.drift.pages import finding_markdown

LABEL = "drift"
LONGEST = 60_000  # characters; GitHub takes 65536


def main(argv: list[str]) -> int:
    """Exit code 0 when every finding has its issue. CalledProcessError when `gh` fails."""
    result = json.loads(Path(argv[1]).read_text(encoding="utf-8"))
    known = {issue["title"]: issue for issue in _listed()}
    for title, body in findings(result).items():
        if title not in known:
            _gh("issue", "create", "--title", title, "--label", LABEL, "--body", body)
        elif known[title]["body"].strip() != body.strip():
            number = str(known[title]["number"])
            _gh("issue", "edit", number, "--body", body)
            _gh("issue", "comment", number, "--body", "The finding changed; see the description.")
        print(title)
    return 0


def findings(result: dict[str, Any]) -> dict[str, str]:
    """Issue title -> body. Findings of one anchor in one tree share an issue."""
    bodies: dict[str, list[str]] = {}
    for entry in [*result["trees"], *result.get("flashinfer", ())]:
        of = entry["tree"] if entry["tree"].startswith("flashinfer ") else f"vLLM {entry['tree']}"
        if entry["error"]:
            title = f"{of} could not be judged"
            bodies[title] = [f"`{entry['error']}`"]
        for finding in entry["findings"]:
            if finding["verdict"] != "drifted":
                continue
            title = f"{finding['id']} does not fit {of}"
            bodies.setdefault(title, []).append(finding_markdown(finding))
    return {title: _body(parts) for title, parts in bodies.items()}


def _body(parts: list[str]) -> str:
    """Sections joined, as many as an issue's description can hold."""
    kept = list(parts)
    while len("\n\n".join(kept)) > LONGEST and len(kept) > 1:
        kept.pop()
    rest = len(parts) - len(kept)
    return "\n\n".join([*kept, *([f"And {rest} more, in the run's report."] if rest else [])])


def _listed() -> list[dict[str, Any]]:
    _gh("label", "create", LABEL, "--force", "--description", "A vLLM release does not fit")
    fields = ("--json", "number,title,body")
    return json.loads(_gh("issue", "list", "--label", LABEL, "--limit", "500", *fields))


def _gh(*arguments: str) -> str:
    return subprocess.run(("gh", *arguments), check=True, text=True, stdout=subprocess.PIPE).stdout


if __name__ == "__main__":
    raise SystemExit(main(sys.argv))
