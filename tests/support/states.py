"""What the tests of states share: what `status` says, and a refusal that leaves all as it was."""

from __future__ import annotations

from bad_environments import check_refusal
from hotfix_rig import Answer, Rig, identity

STATE = ".vision-exp"


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
