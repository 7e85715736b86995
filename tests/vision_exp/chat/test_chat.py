"""Chat messages, prompts and status codes on every release: one child process for each.

The checks are the functions `check_*` of in_vllm/checks_*.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_rig import BY_RELEASE, check_results

CHILD = Path(__file__).parent / "in_vllm" / "child_chat.py"
CHECKS = 46  # so that a check that silently stops running is noticed


@pytest.mark.parametrize("version", BY_RELEASE)
def test_release(version):
    check_results(CHILD, version, CHECKS)
