"""How far rms_norm_eps moves the logits: 1e-6 forced (the default) against the checkpoint's 1e-20.

checks_eps.py dump MODEL OUT.pt       (once as it is, once under VISION_EXP_RMS_NORM_EPS=keep)
checks_eps.py compare REPORT.json FORCED.pt KEPT.pt
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.capture import logits_of
from gpu.checks_reference import asks
from gpu.rig import Engine, Report


def dump(folder: str, out: str) -> int:
    engine = Engine(folder)
    epsilon = engine.model.config.rms_norm_eps
    found = {}
    for name, ask in asks().items():
        engine.forget()
        with logits_of(engine.model) as logits:
            engine.ask(ask, max_tokens=1)
        found[name] = logits[0][0]
    torch.save({"eps": epsilon, "logits": found}, out)
    return 0


def compare(report_path: str, forced: str, kept: str) -> int:
    report = Report(Path(report_path))
    left, right = torch.load(forced), torch.load(kept)
    applied = left["eps"] == 1e-6 and right["eps"] == 1e-20
    report.add("rms_norm_eps forced and kept", applied, f"{left['eps']} and {right['eps']}")
    for name, logits in left["logits"].items():
        other = right["logits"][name]
        largest = float((logits - other).abs().max())
        same = int(logits.argmax()) == int(other.argmax())
        detail = (
            f"largest difference of logits {largest:.3g} (their standard deviation "
            f"{float(logits.std()):.3g}), same first token: {same}"
        )
        report.add(f"eps 1e-6 against 1e-20, {name}", None, detail)
    return 0


if __name__ == "__main__":
    sys.exit({"dump": dump, "compare": compare}[sys.argv[1]](*sys.argv[2:]))
