"""Routing and step checks inside each real vLLM release, one process per release."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import vllm_rig

CHILD = Path(__file__).parent / "in_vllm" / "child_routing.py"
LEAST = 20  # checks; a child that ran fewer did not do its work


@pytest.mark.parametrize("version", vllm_rig.BY_RELEASE)
def test_release(version, tmp_path):
    result = tmp_path / "result.json"
    done = vllm_rig.run_child(CHILD, vllm_rig.tree(version), str(result))
    assert result.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    checks = json.loads(result.read_text())["checks"]
    failed = {name: trace for name, trace in checks.items() if trace}
    assert not failed, "\n".join(f"{name}\n{trace}" for name, trace in failed.items())
    assert len(checks) >= LEAST
