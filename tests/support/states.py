"""What the tests of states share: what `status` and `drift` say, and a refusal that leaves
all as it was.
"""

from __future__ import annotations

from pathlib import Path

from bad_environments import check_refusal
from hotfix_rig import REPO, Answer, Rig, identity

from anchors.drift import verdict
from anchors.drift.trees import Tree
from anchors.engine import requirements
from anchors.sites import all_anchors

STATE = ".vision-exp"
NEEDS = requirements.collect(str(REPO / "vision_exp"))


def state(rig: Rig) -> str:
    """What `status` says; it must not write, and its exit code must fit."""
    before = identity(rig.base)
    answer = rig.run("--json", "status")
    assert identity(rig.base) == before
    found = answer.json["state"]
    good = found in ("applied", "superseded", "applied-unrecorded")
    assert answer.code == answer.json["exit"]
    assert (answer.code == 0) == good, (found, answer.code)
    return found


def check_refused(rig: Rig, *words: str, verb: str = "apply", code: int = 3) -> Answer:
    before = identity(rig.base)
    answer = rig.run(verb)
    check_refusal(answer, code, *words)
    assert identity(rig.base) == before
    return answer


def drift_says(root: Path) -> tuple[str, str]:
    """The verdict of `drift`, and all that it says."""
    found = verdict.assess(Tree("tree", root), all_anchors(), NEEDS)
    return found.verdict, "\n".join(f"{f.detail}: {f.found}" for f in found.findings)
