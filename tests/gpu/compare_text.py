"""Judges the dumps of `dump_text.py`: stock tree, patched tree, patched vision checkpoint.

compare_text.py REPORT.json STOCK.pt PATCHED.pt VISION.pt
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.rig import Report


def compare(left: dict, right: dict) -> tuple[bool, str]:
    """True when tokens and every captured tensor have the same bits."""
    pairs = list(zip(left["captured"], right["captured"], strict=True))
    differ = [
        f"{kind} {index}: {float((a.float() - b.float()).abs().max()):.3g}"
        for index, ((kind, a), (_, b)) in enumerate(pairs)
        if not torch.equal(a, b)
    ]
    rows = sum(a.shape[0] for (_, a), _ in pairs)
    words = (
        f"{len(pairs)} tensors of {rows} rows, tokens equal: {left['tokens'] == right['tokens']}"
    )
    if differ:
        return False, f"{len(differ)} of {words}; first: {differ[0]}"
    return left["tokens"] == right["tokens"], f"all {words}"


def main(report_path: str, stock: str, patched: str, vision: str) -> int:
    report = Report(Path(report_path))
    base = torch.load(stock)
    for name, path in (
        ("text checkpoint: patched equals stock bit for bit", patched),
        ("text requests to the vision checkpoint equal stock bit for bit", vision),
    ):
        report.run(name, lambda path=path: compare(base, torch.load(path)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
