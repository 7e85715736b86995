"""An overlay that is gone, changed or switched off: who notices, and who does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import vllm_rig

CHILD = Path(__file__).parents[1] / "in_vllm" / "child_broken.py"


@pytest.mark.parametrize(
    ("damage", "release"),
    [
        pytest.param(
            damage, *release.values, marks=release.marks, id=f"{damage}-{release.values[0]}"
        )
        for damage, release in zip(
            ("missing", "edited", "switched off"),
            (vllm_rig.BY_RELEASE[i] for i in (-1, 0, 2)),
            strict=True,
        )
    ],
)
def test_without_a_working_overlay(damage: str, release: str, tmp_path: Path) -> None:
    tree = vllm_rig.patched_tree(release, tmp_path / "patched")
    overlay = tree / "overlay"
    manifest = json.loads((overlay / "vision_exp.manifest.json").read_text())
    if damage == "missing":
        shutil.rmtree(overlay)
    elif damage == "edited":
        path = overlay / "vision_exp" / "layout.py"
        path.write_bytes(path.read_bytes() + b"# one line more\n")
    off = damage == "switched off"
    done = vllm_rig.run_child(
        CHILD,
        tree,
        "off" if off else manifest["digest"],
        env={"VISION_EXP_DISABLE": "1"} if off else None,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as it should be" in done.stdout
