"""What older and newer builds of this tool left in a vLLM."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import hotfix_rig
import pytest
import sources
from hotfix_rig import REPO, Rig, contents
from states import STATE, check_refused, state


def build(folder: Path, version: str) -> Path:
    """A copy of this tool with another version, another hook text and another overlay."""
    shutil.copytree(REPO / "anchors", folder / "anchors")
    shutil.copytree(REPO / "vision_exp", folder / "vision_exp")
    shutil.copy(REPO / "hotfix.py", folder)
    init = folder / "anchors" / "__init__.py"
    init.write_text(init.read_text().replace('__version__ = "', f'__version__ = "{version}" or "'))
    (hook,) = [
        path
        for path in (folder / "anchors").rglob("*.py")
        if "no image input (" in path.read_text()
    ]
    hook.write_text(hook.read_text().replace("no image input (", "no images ("))
    with (folder / "vision_exp" / "install.py").open("a") as file:
        file.write("\nBUILD = 'another'\n")
    return folder / "hotfix.py"


def run_build(tool: Path, rig: Rig, verb: str) -> None:
    command = [sys.executable, "-B", str(tool), *rig.arguments(verb)]
    done = subprocess.run(command, env=rig.environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("recorded", [True, False], ids=["receipt", "no-receipt"])
def test_outdated_is_upgraded_to_what_a_fresh_apply_gives(
    tmp_path: Path, rig: Rig, recorded: bool
) -> None:
    fresh = hotfix_rig.make(tmp_path / "fresh", "0.29.0")
    answer = hotfix_rig.call(
        ["--root", str(fresh.root), "--overlay-root", str(rig.overlay), "apply"], fresh.environment
    )
    assert answer.code == 0
    wanted = contents(fresh.root)
    shutil.rmtree(rig.overlay)

    run_build(build(tmp_path / "old", "0.0.9"), rig, "apply")
    older = contents(rig.root)
    if not recorded:
        shutil.rmtree(rig.root / STATE)
    assert state(rig) == "outdated"
    assert rig.run("apply").code == 0
    assert state(rig) == "applied"
    now = contents(rig.root)
    assert {k: v for k, v in now.items() if STATE not in k} == {
        k: v for k, v in wanted.items() if STATE not in k
    }
    assert now != older
    assert "BUILD" not in (rig.overlay / "vision_exp" / "install.py").read_text()
    assert rig.run("revert").code == 0
    assert contents(rig.site) == contents(sources.stock("0.29.0"))


def test_outdated_can_be_reverted(tmp_path: Path, rig: Rig) -> None:
    run_build(build(tmp_path / "old", "0.0.9"), rig, "apply")
    assert rig.run("revert").code == 0
    assert contents(rig.site) == contents(sources.stock("0.29.0"))
    assert not (rig.overlay / "vision_exp").exists()


@pytest.mark.parametrize("recorded", [True, False], ids=["receipt", "no-receipt"])
def test_work_of_a_newer_tool_is_left_alone(tmp_path: Path, rig: Rig, recorded: bool) -> None:
    run_build(build(tmp_path / "new", "99.0.0"), rig, "apply")
    if not recorded:
        shutil.rmtree(rig.root / STATE)
    check_refused(rig, "99.0.0")
    check_refused(rig, "99.0.0", verb="revert")
