"""No request hurts the next one: random sequences on a real server with both caches, on CPU.

What runs is in in_vllm/sequences.py and failed_answers.py. More of them, on all releases:
`python bench/sequences.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_rig import BY_END, check_results

CHILD = Path(__file__).parent / "in_vllm" / "child_sequences.py"
KINDS = ("lru=8", "shm=5", "none=1", "several=1", "offline=1")  # 30 sequences in all


@pytest.mark.parametrize("version", BY_END)
def test_release(version: str) -> None:
    check_results(CHILD, version, len(KINDS), *KINDS)
