"""Judges the dumps of `dump_text.py`: the captured tensors must have the same bits.

    compare_text.py REPORT.json STOCK.pt PATCHED.pt VISION.pt
    compare_text.py REPORT.json STOCK.pt STOCK_AGAIN.pt

The second form is the control: stock against itself in another process.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.rig import Report

NAMES = (
    "text checkpoint: patched equals stock bit for bit",
    "text requests to the vision checkpoint equal stock bit for bit",
)
CONTROL = ("control: stock equals stock of another process bit for bit",)


def compare(left: dict, right: dict) -> tuple[bool, str]:
    """True when tokens and every captured tensor are equal."""
    pairs = list(zip(left["captured"], right["captured"], strict=True))
    differ = [
        f"{kind} {index}: {float((a.float() - b.float()).abs().max()):.3g}"
        for index, ((kind, a), (_, b)) in enumerate(pairs)
        if not torch.equal(a, b)
    ]
    rows = sum(a.shape[0] for (_, a), _ in pairs)
    tokens = left["tokens"] == right["tokens"]
    words = f"{len(pairs)} tensors of {rows} rows, tokens equal: {tokens}"
    if differ:
        return False, f"{len(differ)} of {words}; first: {differ[0]}"
    return tokens, f"all {words}"


def main(report_path: str, stock: str, *others: str) -> int:
    report = Report(Path(report_path))
    base = torch.load(stock)
    for name, path in zip(NAMES if len(others) > 1 else CONTROL, others, strict=True):
        report.run(name, lambda path=path: compare(base, torch.load(path)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
