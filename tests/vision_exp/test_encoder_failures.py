"""Images that cannot be encoded, on every release: one child process for each.

The checks are the scenarios of children/failures_child.py, with real worker processes, and the
functions `check_*` of children/failures_checks.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_rig import BY_RELEASE, check_results

CHILD = Path(__file__).parent / "children" / "failures_child.py"
CHECKS = 18  # so that a check that silently stops running is noticed


@pytest.mark.parametrize("version", BY_RELEASE)
def test_release(version: str) -> None:
    check_results(CHILD, version, CHECKS)
