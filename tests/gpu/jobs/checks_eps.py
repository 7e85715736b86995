"""How far rms_norm_eps moves the logits: 1e-6 forced (the default) against the checkpoint's 1e-20.

checks_eps.py dump MODEL OUT.pt       (once as it is, once under VISION_EXP_RMS_NORM_EPS=keep)
checks_eps.py compare REPORT.json FORCED.pt KEPT.pt

Repeats of one prompt differ by themselves, so both have several: what one of them is away from any
of the other kind is beside what two of one kind are away from each other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import combinations, product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu.jobs.checks_reference import asks
from gpu.lib.capture import logits_of
from gpu.lib.rig import Engine, Report

REPEATS = 6


def dump(folder: str, out: str) -> int:
    engine = Engine(folder)
    epsilon = engine.model.config.rms_norm_eps
    found = {}
    for name, ask in asks().items():
        with logits_of(engine.model) as logits:
            for _ in range(REPEATS):
                engine.cold(ask, max_tokens=1)
        found[name] = [rows[0] for rows in logits]
    torch.save({"eps": epsilon, "logits": found}, out)
    return 0


def compare(report_path: str, forced: str, kept: str) -> int:
    report = Report(Path(report_path))
    left, right = torch.load(forced), torch.load(kept)
    applied = left["eps"] == 1e-6 and right["eps"] == 1e-20
    report.add("rms_norm_eps forced and kept", applied, f"{left['eps']} and {right['eps']}")
    for name, logits in left["logits"].items():
        other = right["logits"][name]
        across = differences(product(logits, other))
        within = differences([*combinations(logits, 2), *combinations(other, 2)])
        first = {int(row.argmax()) for row in logits} & {int(row.argmax()) for row in other}
        detail = (
            f"largest difference of logits {across[0]:.3g} to {across[1]:.3g} over "
            f"{len(logits)} x {len(other)} pairs, of two with one eps {within[0]:.3g} to "
            f"{within[1]:.3g}; their standard deviation {float(logits[0].std()):.3g}; "
            f"same first token: {bool(first)}"
        )
        report.add(f"eps 1e-6 against 1e-20, {name}", None, detail)
    return 0


def differences(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, float]:
    """The largest difference of two runs' logits: for the nearest pair, and for the furthest."""
    found = [float((one - two).abs().max()) for one, two in pairs]
    return min(found), max(found)


if __name__ == "__main__":
    sys.exit({"dump": dump, "compare": compare}[sys.argv[1]](*sys.argv[2:]))
