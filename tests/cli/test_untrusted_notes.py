"""Receipts and journals that cannot be trusted."""

from __future__ import annotations

import json

import pytest
import sources
from hotfix_rig import Rig, contents, identity
from states import STATE, check_refused, state

BAD_JSON = {
    "empty": "",
    "cut-off": '{"schema": 1, "fil',
    "binary": "\0\1\2",
    "list": "[]",
    "deep": "[" * 100_000,
    "tool-is-text": '{"schema": 1, "tool": "x"}',
}


@pytest.mark.parametrize("kind", BAD_JSON)
def test_corrupt_receipt(applied: Rig, kind: str) -> None:
    fresh = contents(applied.base)
    (applied.root / STATE / "receipt.json").write_text(BAD_JSON[kind])
    assert state(applied) == "applied-unrecorded"
    assert applied.run("apply").code == 0
    assert contents(applied.base).keys() == fresh.keys()
    assert state(applied) == "applied"
    (applied.root / STATE / "receipt.json").write_text(BAD_JSON[kind])
    assert applied.run("revert").code == 0
    assert contents(applied.site) == contents(sources.stock("0.29.0"))


def test_receipt_of_a_newer_tool(applied: Rig) -> None:
    path = applied.root / STATE / "receipt.json"
    receipt = json.loads(path.read_text())
    receipt["schema"] += 1
    path.write_text(json.dumps(receipt))
    check_refused(applied, "newer")
    check_refused(applied, "newer", verb="revert")


@pytest.mark.parametrize("kind", BAD_JSON)
def test_corrupt_journal(applied: Rig, kind: str) -> None:
    (applied.root / STATE / "journal.json").write_text(BAD_JSON[kind])
    before = identity(applied.base)
    for verb in ("apply", "revert"):
        answer = applied.run(verb)
        assert answer.code == 5, answer.err
        assert "journal" in answer.cause
        assert "next:" in answer.err
        assert identity(applied.base) == before
    assert applied.run("--json", "status").json["state"] == "interrupted"
