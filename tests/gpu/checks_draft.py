"""DSpark drafting on: image requests give the greedy tokens that they give with it off.

    checks_draft.py MODEL REPORT.json EAGER.json

The draft runs on the other model runner (V2), so this also is the image path of that runner.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu import checks_reference
from gpu.rig import Engine, Report, load_answers

#: Numbers of drafted tokens in the order in which they are tried: releases differ in this.
TRIED = (3, 6)


def main(folder: str, report_path: str, eager_path: str) -> int:
    report = Report(Path(report_path))
    engine, k = start(folder)
    eager = load_answers(Path(eager_path))
    for name, ask in checks_reference.asks().items():

        def check(name: str = name, ask: object = ask) -> tuple[bool, str]:
            answer = engine.cold(ask)
            good, words = answer.agrees(eager[name])
            return good, f"{words}; with {answer.tokens}, without {eager[name].tokens}"

        report.run(f"DSpark k={k}, {name}: greedy tokens as without", check)
    report.run("DSpark: draft layers hold bias_vl", lambda: draft_bias(engine))
    return 0


def start(folder: str) -> tuple[Engine, int]:
    """An engine with the first number of drafted tokens that this vLLM's config takes."""
    refused = []
    for k in TRIED:
        speculation = {"method": "dspark", "num_speculative_tokens": k}
        try:
            return Engine(folder, speculative_config=speculation), k
        except ValueError as error:
            if "num_speculative_tokens" not in str(error):
                raise
            refused.append(f"{k}: {error}")
    raise ValueError("; ".join(refused))


def draft_bias(engine: Engine) -> tuple[bool, str]:
    speculator = engine.runner.speculator
    names = [n for n, _ in speculator.model.named_parameters() if n.endswith("_bias_vl")]
    return len(names) == 3, f"{len(names)} parameters: {', '.join(names)}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
