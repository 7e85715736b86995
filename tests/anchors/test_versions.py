"""Which version is later: one rule, for receipts and for blocks."""

from __future__ import annotations

import hotfix_rig
import pytest
from hotfix_rig import Rig

import anchors
from anchors.engine import fences, versions

ORDERED = (
    "0.0.9",
    "0.1.0.dev3",
    "0.1.0a1",
    "0.1.0b2",
    "0.1.0rc1",
    "0.1.0rc2",
    "0.1.0",
    "0.1.0.post1",
    "0.1.1rc1",
    "0.1.1",
    "0.1.10",
    "0.2",
    "1.0.0",
)


def test_order() -> None:
    keys = [versions.version_key(version) for version in ORDERED]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("same", ["0.1", "0.1.0.0", "0.1.0+local", "v0.1.0"])
def test_same(same: str) -> None:
    assert versions.version_key(same) == versions.version_key("0.1.0")


@pytest.mark.parametrize(
    ("version", "newer"),
    [
        ("0.1.0", False),
        ("0.1.0rc1", False),  # a candidate is before its release
        ("0.1.1rc1", True),
        ("0.2", True),
        ("0.0.99", False),
        ("", False),
        ("?", False),
    ],
)
def test_newer_than_this_tool(monkeypatch: pytest.MonkeyPatch, version: str, newer: bool) -> None:
    monkeypatch.setattr(versions, "__version__", "0.1.0")
    assert versions.is_newer(version) == newer


@pytest.fixture
def rig(tmp_path) -> Rig:
    return hotfix_rig.make(tmp_path / "rig", "0.25.0")


@pytest.mark.parametrize(("version", "code"), [("{}rc1", 0), ("{}.post1", 3), ("99.1rc1", 3)])
def test_receipt_and_blocks_of_another_version(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, version: str, code: int
) -> None:
    """A candidate's work is brought up to date, a later version's is left alone: by the receipt
    and, where that is lost, by the blocks alike."""
    other = version.format(anchors.__version__)
    assert rig.run("apply").code == 0
    stamp = f"Added by vision-exp {anchors.__version__} "
    for path in rig.root.rglob("*.py"):
        text = path.read_text()
        if stamp in text:
            path.write_text(text.replace(stamp, f"Added by vision-exp {other} "))
            assert all(block.intact for block in fences.split(path.read_bytes()).blocks)
    receipt = rig.root / ".vision-exp" / "receipt.json"
    text = receipt.read_text()
    receipt.write_text(text.replace(f'"version": "{anchors.__version__}"', f'"version": "{other}"'))
    assert rig.run("revert" if code else "status").code == (3 if code else 1)
    receipt.unlink()
    answer = rig.run("apply")
    assert answer.code == code, answer.err
    assert rig.run("status").code == (1 if code else 0)
