"""Every verb over every vLLM tree under the folder that VISION_EXP_FORKS names; prints a table.

    VISION_EXP_FORKS=~/forks python -m pytest -s tests/anchors/test_forks.py

A tree is a folder with `vllm/__init__.py` in it. The trees are copied, never written.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hotfix_rig import Rig, contents
from states import drift_says

VARIABLE = "VISION_EXP_FORKS"


def trees() -> list[Path]:
    """The folders that hold a package vllm, none inside another."""
    top = os.environ.get(VARIABLE)
    found = sorted(Path(top).rglob("vllm/__init__.py")) if top else []
    folders = [path.parent.parent for path in found]
    return [f for f in folders if not any(other in f.parents for other in folders)]


def one_tree(rig: Rig) -> tuple[dict[str, str], list[str]]:
    """A line of the table, and in what the verbs disagree or a byte is not given back."""
    before = contents(rig.site)
    drift = drift_says(rig.root)[0]
    says = {"drift": drift, "status": str(rig.run("--json", "status").json["state"])}
    doctor = str(rig.run("--json", "doctor").json["state"])
    applied = rig.run("apply")
    says["apply"] = str(applied.code)
    wrong = []
    if doctor != says["status"]:
        wrong.append(f"doctor says {doctor}")
    if (applied.code == 0) != (drift in ("applies", "superseded")):
        wrong.append("apply and drift disagree")
    if applied.code and contents(rig.site) != before:
        wrong.append("a refused tree was changed")
    says["verify"] = str(rig.run("verify").code)
    if (applied.code == 0) != (says["verify"] == "0"):
        wrong.append("apply and verify disagree")
    again = rig.run("apply").code
    if again != applied.code:
        wrong.append(f"a second apply exits {again}")
    says["revert"] = str(rig.run("revert").code)
    if contents(rig.site) != before:
        wrong.append("revert does not give the bytes back")
    return {**says, "why": applied.cause[:110]}, wrong


def test_every_verb_over_every_fork(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not os.environ.get(VARIABLE):
        pytest.skip(f"NOT RUN: {VARIABLE} names no folder with trees of forks")
    found = trees()
    assert found, f"no vllm/__init__.py under {os.environ[VARIABLE]}"
    wrong, lines = {}, []
    for number, tree in enumerate(found):
        rig = Rig(tmp_path / str(number))
        rig.home.mkdir(parents=True)
        only_python = shutil.ignore_patterns("*.so", "*.pyc", "__pycache__", ".git", ".vision-exp")
        shutil.copytree(tree / "vllm", rig.root, ignore=only_python)
        line, errors = one_tree(rig)
        lines.append(f"{tree.name[:28]:28} " + " ".join(f"{v:14}" for v in line.values()))
        if errors:
            wrong[str(tree)] = errors
        shutil.rmtree(rig.base)
    with capsys.disabled():
        heads = ("drift", "status", "apply", "verify", "revert", "why")
        print("\n" + f"{'tree':28} " + " ".join(f"{head:14}" for head in heads))
        print("\n".join(lines))
    assert not wrong
