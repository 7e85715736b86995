"""Whatever fails on one tree is a judgement about it, and costs no other its own."""

from __future__ import annotations

from pathlib import Path

import hotfix_rig
import pytest
from hotfix_rig import contents
from states import NEEDS, drift_says

from anchors.drift import verdict
from anchors.drift.trees import Tree
from anchors.sites import all_anchors

MODEL = "models/deepseek_v4/nvidia/model.py"
ODD = "\nODD = () if 0 else(lambda:())\n"  # Python takes it, LibCST's parser fails with a TypeError


def test_a_failure_of_libcst_is_a_judgement(tmp_path: Path) -> None:
    rig = hotfix_rig.make(tmp_path, "0.29.0")
    path = rig.root / MODEL
    path.write_text(path.read_text() + ODD)
    before = contents(rig.base)
    for verb, code in (("apply", 3), ("status", 1), ("verify", 1), ("doctor", 1)):
        answer = rig.run("--json", verb)
        assert answer.code == code
        assert answer.json["state"] == "drifted"
        assert (
            "LibCST cannot take models/deepseek_v4/nvidia/model.py"
            in (answer.json["error"]["message"])
        )
    assert contents(rig.base) == before
    word, said = drift_says(rig.root)
    assert word == "drifted"
    assert "LibCST cannot take" in said


class Panic(BaseException):
    """As a panic of a native parser, which is no Exception."""


@pytest.mark.parametrize("kind", [Panic, RuntimeError, AttributeError])
def test_any_failure_costs_one_tree_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    """A fault made here: LibCST fails on one tree, another is judged as ever."""
    import libcst

    rigs = [hotfix_rig.make(tmp_path / name, "0.29.0") for name in ("odd", "sound")]
    odd = rigs[0].root / MODEL
    odd.write_text(odd.read_text() + f"\nODD = {kind.__name__!r}\n")
    parse = libcst.parse_module

    def failing(source: str) -> libcst.Module:
        if "\nODD = " in source:
            raise kind("as told")
        return parse(source)

    monkeypatch.setattr(libcst, "parse_module", failing)
    assert [drift_says(rig.root)[0] for rig in rigs] == ["drifted", "applies"]


def test_a_fault_of_our_own_costs_one_tree_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(*rest: object) -> None:
        raise ZeroDivisionError("as told")

    monkeypatch.setattr(verdict.native, "assess", faulty)
    found = verdict.assess(Tree("tree", tmp_path), all_anchors(), NEEDS)
    assert found.verdict == "error"
    assert "ZeroDivisionError: as told" in found.error
