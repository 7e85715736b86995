"""Writes the anchor table of README.md from the sites themselves.

python3 -m anchors.drift.readme            writes it
python3 -m anchors.drift.readme --check    exit 1 if it is not what it would write
"""

from __future__ import annotations

import json
import os
import sys

from anchors.digests import TOOL_ROOT
from anchors.sites import all_anchors

README = os.path.join(TOOL_ROOT, "README.md")
VERIFIED = os.path.join(TOOL_ROOT, "anchors", "verified.json")
BEGIN = "<!-- anchor table: written by python3 -m anchors.drift.readme -->"
END = "<!-- end of the anchor table -->"


def table() -> str:
    """The table as Markdown: each site, its file, what is done there, where it was seen to hold."""
    lines = [
        "| site | file in `vllm/` | what | applies to (checked) | until |",
        "|---|---|---|---|---|",
    ]
    releases = _releases()
    for anchor in all_anchors():
        cells = (f"`{anchor.id}`", f"`{anchor.file}`", anchor.what, releases.get(anchor.id, ""))
        lines.append(f"| {' | '.join((*cells, anchor.until))} |")
    return "\n".join(lines)


def rendered(text: str) -> str:
    """`text` with a fresh table between its markers. Raises ValueError without markers."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md needs the lines {BEGIN} and {END}")
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


def main(arguments: list[str]) -> int:
    """Writes or checks; 1 where a check finds a difference."""
    with open(README, encoding="utf-8") as file:
        text = file.read()
    wanted = rendered(text)
    if "--check" in arguments:
        if text != wanted:
            print("README.md: the anchor table is not up to date", file=sys.stderr)
        return int(text != wanted)
    with open(README, "w", encoding="utf-8") as file:
        file.write(wanted)
    return 0


def _releases() -> dict[str, str]:
    """Site -> first and last checked release it applies to, from what `drift` recorded."""
    try:
        with open(VERIFIED, encoding="utf-8") as file:
            anchors = json.load(file)["anchors"]
    except FileNotFoundError:
        return {}
    found = {}
    for anchor_id, verdicts in anchors.items():
        applies = verdicts.get("applies", [])
        if applies:
            found[anchor_id] = f"{applies[0]} to {applies[-1]}"
    return found


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
