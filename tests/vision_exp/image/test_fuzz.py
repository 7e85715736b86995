"""Broken and odd images: patches or a ValueError with a reason, within a gibibyte of memory.

What torch takes to import, 0.4 GiB or, built for CUDA, 0.9, is not the images'.
"""

from __future__ import annotations

from pathlib import Path

import plain_child
import vllm_rig

CHILD = Path(__file__).parent / "in_vllm" / "child_fuzz.py"
CASES = 5000
#: Beyond what is held before the first image, in MiB: two images at a time, ours and the
#: reference's, since every kind of image is compared.
MOST = 640


def test_five_thousand_images():
    loader = vllm_rig.tree(vllm_rig.RELEASES[-1]) / "vllm/multimodal/image.py"
    report = plain_child.report(CHILD, str(CASES), str(loader), timeout=600)
    outcomes = report["outcomes"]
    assert sum(outcomes.values()) == CASES
    judged = {name: n for name, n in outcomes.items() if not name.startswith("not opened: ")}
    assert judged.keys() == {"patches", "ValueError"}, outcomes
    assert judged["patches"] > 1000
    assert judged["ValueError"] > 300
    assert report["compared"] > 300
    assert report["differing"] == 0
    assert report["peak_mib"] - report["before_mib"] < MOST, report
