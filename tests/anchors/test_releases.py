"""Every official release through apply, apply, verify, diff --reverse and revert."""

from __future__ import annotations

import compileall
from pathlib import Path

import hotfix_rig
import pytest
import sources
from hotfix_rig import Rig, contents, identity

DSPARK_ANCHORS = {"dspark-bias-vl", "dspark-hook"}
EVERYWHERE = {"config-hook", "model-hook", "mtp-bias-vl", "mtp-hook"}
NATIVE_CLASS = "DeepseekV4ForConditionalGeneration"


def anchor_states(answer: hotfix_rig.Answer) -> dict[str, str]:
    return {a["id"]: a["state"] for file in answer.json["files"] for a in file["anchors"]}


@pytest.mark.parametrize("version", sources.TEXT_ONLY)
def test_text_only_release(tmp_path: Path, version: str) -> None:
    rig = hotfix_rig.make(tmp_path, version)
    stock = contents(rig.site)

    before = rig.run("--json", "status")
    assert (before.code, before.json["state"]) == (1, "pristine")
    assert before.json["vllm"] == {"root": str(rig.root), "version": version}
    assert contents(rig.site) == stock

    first = rig.run("--json", "apply")
    assert (first.code, first.json["state"], first.json["error"]) == (0, "applied", None)
    _check_anchors(first, version)
    _check_compiles(rig)

    applied = identity(rig.base)
    second = rig.run("--json", "apply")
    assert (second.code, second.json["state"]) == (0, "applied")
    assert identity(rig.base) == applied, "the second apply wrote something"

    assert rig.run("status").code == 0
    assert rig.run("verify").code == 0
    reverse = rig.run("diff", "--reverse")
    assert reverse.code == 0
    _check_reverse(reverse.out)
    assert rig.run("diff").out.strip() == ""
    assert identity(rig.base) == applied, "a reading verb wrote something"

    undone = rig.run("--json", "revert")
    assert (undone.code, undone.json["state"]) == (0, "pristine")
    assert contents(rig.site) == stock
    assert not (rig.overlay / "vision_exp").exists()

    reverted = identity(rig.base)
    assert rig.run("revert").code == 0
    assert identity(rig.base) == reverted, "the second revert wrote something"


def _check_anchors(answer: hotfix_rig.Answer, version: str) -> None:
    states = anchor_states(answer)
    assert states.keys() >= EVERYWHERE | DSPARK_ANCHORS
    for anchor in EVERYWHERE:
        assert states[anchor] == "applied", anchor
    wanted = "not-applicable" if version in sources.WITHOUT_DSPARK else "applied"
    for anchor in DSPARK_ANCHORS:
        assert states[anchor] == wanted, anchor


def _check_compiles(rig: Rig) -> None:
    pycache = rig.base / "pycache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.pycache_prefix", str(pycache))
        assert compileall.compile_dir(rig.root, quiet=1, force=True)
        assert compileall.compile_dir(rig.overlay, quiet=1, force=True)


def _check_reverse(diff: str) -> None:
    """Undoing only takes lines away: nothing of the release's own text was changed."""
    body = [line for line in diff.splitlines() if not line.startswith(("+++", "---"))]
    assert not [line for line in body if line.startswith("+")]
    removed = [line[1:] for line in body if line.startswith("-")]
    assert any(">>> vision-exp:" in line for line in removed)


@pytest.mark.parametrize("version", sources.NATIVE)
def test_release_that_serves_the_model_itself(tmp_path: Path, version: str) -> None:
    rig = hotfix_rig.make(tmp_path, version)
    before = identity(rig.base)
    answer = rig.run("apply")
    assert answer.code == 0
    assert NATIVE_CLASS in answer.out
    assert rig.run("--json", "apply").json["state"] == "superseded"
    assert rig.run("--json", "status").json["state"] == "superseded"
    for verb in (["apply", "--dry-run"], ["verify"], ["status"], ["diff"], ["revert"], ["doctor"]):
        assert rig.run(*verb).code == 0, verb
    assert identity(rig.base) == before
    assert not rig.overlay.exists()


def test_a_release_is_assessed_by_content_and_not_by_its_version(tmp_path: Path) -> None:
    """0.29.0 that calls itself 0.31.0 is applied; 0.31.0 that calls itself 0.29.0 is superseded."""
    for content, label, state in (
        ("0.29.0", "0.31.0", "applied"),
        ("0.31.0", "0.29.0", "superseded"),
    ):
        rig = hotfix_rig.make(tmp_path / content, content)
        (info,) = rig.site.glob("*.dist-info")
        metadata = info / "METADATA"
        metadata.write_text(
            metadata.read_text().replace(f"\nVersion: {content}", f"\nVersion: {label}")
        )
        info.rename(info.with_name(f"vllm-{label}.dist-info"))
        version_file = rig.root / "_version.py"
        version_file.write_text(version_file.read_text().replace(content, label))
        answer = rig.run("--json", "apply")
        assert (answer.code, answer.json["state"]) == (0, state)
        assert answer.json["vllm"]["version"] == label


@pytest.mark.parametrize("version", ["0.22.0", "0.29.0"])
def test_a_file_mode_survives(tmp_path: Path, version: str) -> None:
    rig = hotfix_rig.make(tmp_path, version)
    model = rig.root / "models/deepseek_v4/nvidia/model.py"
    model.chmod(0o640)
    stock = contents(rig.site)
    assert rig.run("apply").code == 0
    assert model.stat().st_mode & 0o7777 == 0o640
    assert rig.run("revert").code == 0
    assert contents(rig.site) == stock


def test_byte_order_mark_and_line_endings_survive(tmp_path: Path) -> None:
    rig = hotfix_rig.make(tmp_path, "0.29.0")
    mtp = rig.root / "models/deepseek_v4/nvidia/mtp.py"
    mtp.write_bytes(b"\xef\xbb\xbf" + mtp.read_bytes().replace(b"\n", b"\r\n"))
    stock = contents(rig.site)
    assert rig.run("apply").code == 0
    patched = mtp.read_bytes()
    assert patched.startswith(b"\xef\xbb\xbf# SPDX")
    assert patched.count(b"\n") == patched.count(b"\r\n")
    assert rig.run("revert").code == 0
    assert contents(rig.site) == stock
