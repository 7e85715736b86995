"""Broken and odd pictures: patches or a ValueError with a reason, within a gibibyte of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import vllm_rig

CHILD = Path(__file__).parent / "children" / "image_fuzz.py"
CASES = 5000


def test_five_thousand_pictures():
    loader = vllm_rig.tree(vllm_rig.RELEASES[-1]) / "vllm/multimodal/image.py"
    done = subprocess.run(
        [sys.executable, str(CHILD), str(CASES), str(loader)],
        env={**os.environ, "PYTHONPATH": str(CHILD.parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == 1, done.stderr[-4000:]
    report = json.loads(lines[0].removeprefix("RESULT "))
    outcomes = report["outcomes"]
    assert sum(outcomes.values()) == CASES
    judged = {name: n for name, n in outcomes.items() if not name.startswith("not opened: ")}
    assert judged.keys() == {"patches", "ValueError"}, outcomes
    assert judged["patches"] > 1000
    assert judged["ValueError"] > 300
    assert report["compared"] > 300
    assert report["differing"] == 0
    assert report["peak_mib"] < 1024, report
