"""Links, mounts, full disks and missing rights under the files that would be written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from bad_environments import (
    CONFIG,
    MODEL,
    MTP,
    check_refusal,
    inside_mounts,
    needs_root,
    without_privilege,
)
from hotfix_rig import Rig, contents, identity

TOO_MUCH = {
    "brackets": "(" * 3000 + "1" + ")" * 3000,
    "sum": " + ".join(["1"] * 30_000),
    "sum-in-what-this-python-takes": " + ".join(["1"] * 900),
    "and": " and ".join(["a"] * 30_000),
    "conditions": " if a else ".join(["a"] * 900),
    "strings": "1\nclass B:\n def load_weights(self):\n  return " + "'a' " * 2000,
    "sum-before-a-syntax-error": " + ".join(["1"] * 30_000) + "\ndef broken(:",
}


@pytest.mark.parametrize("kind", TOO_MUCH)
def test_source_that_the_parser_could_not_bear(rig: Rig, kind: str) -> None:
    """Refused before LibCST gets it, whose time grows with the square of such nesting."""
    path = rig.root / MTP
    path.write_text(path.read_text() + f"X = {TOO_MUCH[kind]}\n")
    before = contents(rig.base)
    start = os.times()
    # In a process of its own: a parser that overflows its stack takes the process with it.
    answer = rig.spawn("apply")
    check_refusal(answer, 3, MTP)
    assert "parse" in answer.cause
    assert contents(rig.base) == before
    assert rig.spawn("status").code == 1
    took = os.times()
    assert took.children_user - start.children_user < 4, "seconds of two runs"


def test_a_file_that_ends_in_a_carriage_return(rig: Rig) -> None:
    """Rare, and no reason to refuse: its last byte comes back as well."""
    path = rig.root / CONFIG
    path.write_bytes(path.read_bytes().rstrip() + b"\r")
    before = path.read_bytes()
    assert rig.run("apply").code == 0
    assert rig.run("verify").code == 0
    assert rig.run("revert").code == 0
    assert path.read_bytes() == before


@pytest.mark.parametrize("verb", ["apply", "revert"])
@pytest.mark.parametrize("place", ["", "lock", "lock-folder", "undo", "originals"])
def test_state_folder_that_is_not_ours(rig: Rig, tmp_path: Path, place: str, verb: str) -> None:
    """A link there would have files written, or cleared away, where they are none of ours."""
    if verb == "revert":
        assert rig.run("apply").code == 0
    elsewhere, state = tmp_path / "elsewhere", rig.root / ".vision-exp"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("precious")
    malformed = state / place.partition("-")[0]
    if malformed.is_dir():
        shutil.rmtree(malformed)
    malformed.parent.mkdir(exist_ok=True)
    if place == "lock-folder":
        malformed.mkdir()
    else:
        malformed.symlink_to(elsewhere / "file" if place == "lock" else elsewhere)
    before = contents(tmp_path)
    check_refusal(rig.run(verb), 6, ".vision-exp")
    assert contents(tmp_path) == before


def test_hard_link_shared_with_another_environment(rig: Rig) -> None:
    other = rig.base / "other.py"
    other.hardlink_to(rig.root / MODEL)
    before = other.read_bytes()
    answer = rig.run("apply")
    assert answer.code == 0, answer.err
    assert other.read_bytes() == before
    assert b">>> vision-exp:" in (rig.root / MODEL).read_bytes()


def test_symbolic_link_into_another_environment(rig: Rig) -> None:
    other = rig.base / "elsewhere" / "model.py"
    other.parent.mkdir()
    (rig.root / MODEL).rename(other)
    (rig.root / MODEL).symlink_to(other)
    before = contents(rig.base)
    answer = rig.run("apply")
    check_refusal(answer, 6, "link", "model.py")
    assert contents(rig.base) == before


@needs_root
def test_target_that_is_a_mount_point(rig: Rig) -> None:
    before = contents(rig.base)
    model = rig.root / MODEL
    answer = inside_mounts(
        rig, f"cp {model} {rig.base}/mounted\nmount --bind {rig.base}/mounted {model}", "apply"
    )
    check_refusal(answer, 6, "mount", "model.py")
    assert {k: v for k, v in contents(rig.base).items() if k != "mounted"} == before


@needs_root
def test_read_only_file_system(rig: Rig) -> None:
    mount = f"mount --bind {rig.site} {rig.site}\nmount -o remount,bind,ro {rig.site}"
    before = identity(rig.base)
    answer = inside_mounts(rig, mount, "apply")
    check_refusal(answer, 6, "read-only")
    assert identity(rig.base) == before

    assert rig.run("apply").code == 0
    before = identity(rig.base)
    for verb in ("apply", "status", "verify", "doctor"):
        answer = inside_mounts(rig, mount, verb)
        assert answer.code == 0, (verb, answer.err)
    check_refusal(inside_mounts(rig, mount, "revert"), 6, "read-only")
    assert identity(rig.base) == before


@needs_root
@pytest.mark.parametrize("kib", [0, 64, 200])
def test_disk_full(rig: Rig, kib: int) -> None:
    """With nothing free, with room for one file, with room for some."""
    script = f"""
        cp -a {rig.site} {rig.base}/copy
        mount -t tmpfs -o size=16m tmpfs {rig.site}
        cp -a {rig.base}/copy/. {rig.site}
        head -c {kib}k /dev/zero > {rig.site}/room
        dd if=/dev/zero of={rig.site}/filler bs=4k >/dev/null 2>&1 || true
        rm {rig.site}/room
        cd {rig.site}
        find vllm -type f | sort | xargs sha256sum > {rig.base}/before
        set +e
        "$@"
        code=$?
        find vllm -type f | sort | xargs sha256sum | diff - {rig.base}/before >&2 || exit 99
        ls -a vllm/models/deepseek_v4/nvidia > {rig.base}/left
        exit $code
    """
    answer = inside_mounts(rig, script, "apply")
    assert answer.code in (4, 6), answer.err
    assert "no space" in answer.err.lower()
    assert "next:" in answer.err
    left = (rig.base / "left").read_text().split()
    names = [path.name for path in (rig.root / MODEL).parent.iterdir()]
    assert sorted(left) == sorted([".", "..", *names])
    assert not (rig.overlay / "vision_exp").exists()


def test_a_target_that_cannot_be_read(rig: Rig) -> None:
    """What is in it cannot be told: no answer (1) and no verdict on the source (3)."""
    (rig.root / MTP).chmod(0)
    before = identity(rig.base)
    told = {verb: without_privilege(rig, verb) for verb in ("apply", "status", "verify")}
    for answer in told.values():
        check_refusal(answer, 6, "mtp.py", "permission")
    assert len({answer.cause for answer in told.values()}) == 1
    assert identity(rig.base) == before


@pytest.mark.parametrize("where", ["nvidia", "configs", "all"])
def test_no_permission(rig: Rig, where: str) -> None:
    folders = {
        "nvidia": [(rig.root / MODEL).parent],
        "configs": [(rig.root / CONFIG).parent],
        "all": [p for p in rig.site.rglob("*") if p.is_dir()],
    }[where]
    for folder in folders:
        folder.chmod(0o555)
    before = identity(rig.base)
    answer = without_privilege(rig, "apply")
    check_refusal(answer, 6, "permi")
    assert identity(rig.base) == before


def test_an_applied_tree_needs_no_permission(rig: Rig) -> None:
    assert rig.run("apply").code == 0
    for path in [rig.site, *rig.site.rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o222)
    before = identity(rig.base)
    answer = without_privilege(rig, "apply")
    assert answer.code == 0, answer.err
    assert identity(rig.base) == before


@needs_root
def test_an_owner_that_cannot_be_kept_is_named(rig: Rig) -> None:
    """Files of the user's own, in a group that the user is not in."""
    os.chown(rig.root / MODEL, -1, 12345)
    before = contents(rig.site)
    answer = rig.spawn("apply", before=["setpriv", "--bounding-set", "-chown"])
    assert answer.code == 4, answer.err
    assert "owner 0:12345 cannot be kept" in answer.cause
    assert "Rolled back" in answer.cause
    assert contents(rig.site) == before
