"""Answers with CUDA graphs and with drafting beside those of the eager engine.

compare_sees.py REPORT.json EAGER.json OTHER.json...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu.lib.accuracy import differing
from gpu.lib.rig import Report

#: Answers of another engine: other kernels, so more than a repeat. Reported, assessed above this.
ALLOWED = 0.05


def main(report_path: str, eager: str, *others: str) -> int:
    report = Report(Path(report_path))
    plain = json.loads(Path(eager).read_text())
    for other in others:
        name = Path(other).stem

        def check(other: str = other) -> tuple[bool, str]:
            path = Path(other)
            if not path.exists():
                return False, "no answers"
            found = json.loads(path.read_text())
            count = min(len(found), len(plain))
            share = differing(plain[:count], found[:count])
            return (
                share <= ALLOWED,
                f"{share:.1%} of {count} answers differ from the eager engine's",
            )

        report.run(f"{name} beside eager", check)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
