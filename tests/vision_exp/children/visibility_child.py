"""Runs in one vLLM release: its real metadata builder and attention classes, on the CPU.

Prints one JSON object as its last line: check name -> what was seen (see observations.py).
"""

from __future__ import annotations

import random

import observations
import torch
import visibility_checks_attention as attention
import visibility_checks_rows as rows
import visibility_rig

from vision_exp import visibility


def main() -> None:
    random.seed(0)
    torch.manual_seed(0)
    visibility_rig.use_triton()
    visibility_rig.skip_overflow_checks()
    visibility.install()
    visibility.install()
    # This machine has no GPU, where it would say `causal` and the builder would do nothing.
    visibility.describe = lambda config: visibility.BIDIRECTIONAL
    with torch.inference_mode():
        observations.report(
            rows.builder_rows,
            rows.nothing_to_widen,
            rows.lost_order,
            attention.flashmla,
            attention.flashinfer_sm120,
            attention.flashinfer_sm100,
            rows.described,
        )


if __name__ == "__main__":
    main()
