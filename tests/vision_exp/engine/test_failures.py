"""Images that cannot be encoded, on the first and the last release, a child each.

On all of them by `bench/all_tests.sh`.

The checks are the scenarios of in_vllm/child_failures.py, with real worker processes, and the
functions `check_*` of in_vllm/checks_failures.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_rig import BY_END, check_results

CHILD = Path(__file__).parent / "in_vllm" / "child_failures.py"
CHECKS = 18  # so that a check that silently stops running is noticed


@pytest.mark.parametrize("version", BY_END)
def test_release(version: str) -> None:
    check_results(CHILD, version, CHECKS)
