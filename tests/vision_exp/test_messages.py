"""Chat messages, prompts and status codes on every release: one child process for each.

The checks are the functions `check_*` of children/messages_checks_*.py, messages_http.py and
offline_checks.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vllm_rig import BY_RELEASE, run_child, tree

CHILD = Path(__file__).parent / "children" / "messages_child.py"
CHECKS = 32  # so that a check that silently stops running is noticed


@pytest.mark.parametrize("version", BY_RELEASE)
def test_release(version):
    done = run_child(CHILD, tree(version), timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    failed = {name: error for name, error in results.items() if error is not None}
    assert not failed, "\n\n".join(f"{name}\n{error}" for name, error in failed.items())
    assert len(results) == CHECKS, sorted(results)
