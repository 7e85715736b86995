"""The line about memory, from real tensors."""

from __future__ import annotations

import torch

from vision_exp.model import memory


def test_the_line_counts_weights_and_cached_rows() -> None:
    held = [torch.empty(1 << 20, dtype=torch.bfloat16), torch.empty(1 << 18, dtype=torch.float32)]
    said = memory.line(held, 2048, 4096, graphs=True)
    assert "weights 3 MiB, CUDA graphs about 140 MiB" in said
    assert said.endswith("cached image rows up to 16 MiB")
    assert "no CUDA graphs" in memory.line(held, 2048, 4096, graphs=False)
