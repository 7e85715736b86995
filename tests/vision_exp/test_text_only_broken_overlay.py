"""An overlay that is gone or changed stops Vision-Exp, by name, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import vllm_rig

CHILD = Path(__file__).parent / "children" / "broken_child.py"


@pytest.mark.parametrize("damage", ["missing", "edited"])
def test_a_broken_overlay(damage: str, tmp_path: Path) -> None:
    release = vllm_rig.RELEASES[-1] if damage == "missing" else vllm_rig.RELEASES[0]
    tree = vllm_rig.patched_tree(release, tmp_path / "patched")
    overlay = tree / "overlay"
    manifest = json.loads((overlay / "vision_exp.manifest.json").read_text())
    if damage == "missing":
        shutil.rmtree(overlay)
    else:
        path = overlay / "vision_exp" / "tower.py"
        path.write_bytes(path.read_bytes() + b"# one line more\n")
    done = vllm_rig.run_child(CHILD, tree, manifest["digest"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as it should be" in done.stdout
