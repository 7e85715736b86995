"""What each site holds, as numbers and digests: a case or an injected text that changes shows."""

from __future__ import annotations

from collections import Counter
from typing import Any

from anchors.digests import sha256
from anchors.engine.cases import run
from anchors.kit.anchor import APPLIES, Anchor, Case
from anchors.sites import all_anchors


def inventory() -> list[dict[str, Any]]:
    """One entry a site: its file, its cases by outcome, a digest of each text it injects."""
    return [
        {
            "id": anchor.id,
            "file": anchor.file,
            "cases": dict(sorted(Counter(case.outcome for case in anchor.cases).items())),
            "edits": [
                sha256(_body(anchor, case).encode())
                for case in anchor.cases
                if case.outcome == APPLIES
            ],
        }
        for anchor in all_anchors()
    ]


def _body(anchor: Anchor, case: Case) -> str:
    """What is injected, without the fence and its header, which carries the version."""
    lines = run(anchor, case.source)[1].splitlines()
    start = next(i for i, line in enumerate(lines) if f">>> vision-exp:{anchor.id}" in line)
    stop = next(i for i, line in enumerate(lines) if f"<<< vision-exp:{anchor.id}" in line)
    return "\n".join(lines[start + 2 : stop])
