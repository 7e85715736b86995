"""Runs in one vLLM release: its real metadata builder and attention classes, on the CPU.

Prints one JSON object as its last line: check name -> what was seen (see observations.py).
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import checks_attention as attention
import checks_attention_rocm as attention_rocm
import checks_rows as rows
import known_launches
import observations
import quick_interpreter
import rig_visibility
import torch

from vision_exp.visibility import hooks, support


def main() -> None:
    random.seed(0)
    torch.manual_seed(0)
    rig_visibility.use_triton()
    quick_interpreter.install()
    launches = known_launches.Launches(Path(os.environ["VISION_EXP_TEST_LAUNCHES"]))
    quick_interpreter.keep(launches)
    hooks.install()
    hooks.install()
    # This machine has no GPU, where it would say `causal` and the builder would do nothing.
    support.describe = lambda config: support.BIDIRECTIONAL
    with torch.inference_mode():
        observations.report(
            rows.builder_rows,
            rows.nothing_to_widen,
            rows.lost_order,
            attention.flashmla,
            attention.passed_by,
            attention_rocm.rocm,
            attention.flashinfer_sm120,
            attention.flashinfer_sm100,
            attention.flashinfer_sm100_long,
            rows.described,
            rows.drafting,
        )


if __name__ == "__main__":
    main()
