"""File systems without locks, without room, and a volume that containers share."""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import subprocess
import sys
from pathlib import Path

import hotfix_rig
import pytest
from bad_environments import check_refusal, in_container, inside_mounts, needs_root
from hotfix_rig import HOTFIX, Rig, contents


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = fcntl.flock

    def flock(handle: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    before = contents(rig.base)
    monkeypatch.setattr(fcntl, "flock", flock)
    check_refusal(rig.run("apply"), 6, "no file locks", "nolock")
    assert contents(rig.base) == before
    assert rig.run("status").code == 1
    monkeypatch.setattr(fcntl, "flock", real)
    assert rig.run("apply").code == 0
    patched = contents(rig.base)
    monkeypatch.setattr(fcntl, "flock", flock)
    check_refusal(rig.run("revert"), 6, "no file locks")
    assert [rig.run(verb).code for verb in ("status", "verify")] == [0, 0]
    assert contents(rig.base) == patched


def test_a_failing_lock_is_no_missing_one(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(handle: int, operation: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    before = contents(rig.root)
    monkeypatch.setattr(fcntl, "flock", flock)
    answer = rig.run("apply")
    assert answer.code == 4, answer.err
    assert "input/output" in answer.err and "no file locks" not in answer.err
    left = {name: entry for name, entry in contents(rig.root).items() if ".vision-exp" not in name}
    assert left == before


@needs_root
@pytest.mark.parametrize("kib", [0, 64, 400, 1500])
def test_a_full_disk_on_revert(rig: Rig, kib: int) -> None:
    """Tree and overlay on one small disk: all new or all old, and it says which."""
    script = f"""
        cp -a {rig.site} {rig.base}/copy
        mount -t tmpfs -o size=24m tmpfs {rig.base}/site
        cp -a {rig.base}/copy/. {rig.site}
        cd {rig.site}
        sums() {{ find vllm -type f -not -path '*/.vision-exp/*' | sort | xargs sha256sum; }}
        sums > {rig.base}/stock
        hotfix() {{ {shlex.quote(sys.executable)} -B {HOTFIX} --root {rig.root} "$@"; }}
        hotfix --overlay-root {rig.site}/overlay apply >/dev/null
        sums > {rig.base}/patched
        dd if=/dev/zero of={rig.site}/room bs=1k count={kib} 2>/dev/null
        dd if=/dev/zero of={rig.site}/filler bs=4k >/dev/null 2>&1 || true
        rm {rig.site}/room
        set +e
        hotfix revert
        code=$?
        sums > {rig.base}/now
        wanted=patched
        [ $code != 0 ] || wanted=stock
        cmp {rig.base}/now {rig.base}/$wanted >&2 || exit 99
        hotfix status >/dev/null
        status=$?
        [ $code = 0 ] || [ $status = 0 ] || exit 98
        rm {rig.site}/filler
        hotfix revert >/dev/null || exit 97
        sums | cmp - {rig.base}/stock >&2 || exit 96
        exit $code
    """
    answer = inside_mounts(rig, script)
    if answer.code:
        assert answer.code in (4, 6), (answer.code, answer.err)
        assert "no space" in answer.err.lower() and "next:" in answer.err
    assert kib or answer.code == 6, "a full disk refuses before anything is written"


@needs_root
def test_two_containers_of_one_path_share_an_overlay(tmp_path: Path) -> None:
    """Each tree is an overlayfs mount at the same path; the overlay root is a volume beside it."""
    rig = hotfix_rig.make(tmp_path / "image", "0.29.0")
    volume = tmp_path / "volume"
    words = [sys.executable, "-B", str(HOTFIX), "--root", str(rig.root)]
    hotfix = shlex.join([*words, "--overlay-root", str(volume)])

    def inside(name: str, verb: str) -> subprocess.CompletedProcess[str]:
        return in_container(rig, tmp_path / name, f"{hotfix} {verb}")

    tried = in_container(rig, tmp_path / "trial", "true")
    if tried.returncode:
        pytest.skip(f"NOT RUN: this machine mounts no overlayfs for us: {tried.stderr.strip()}")
    first = inside("one", "apply")
    assert first.returncode == 0, first.stderr
    assert inside("two", "apply").returncode == 0
    reverted = inside("one", "revert")
    assert reverted.returncode == 0, reverted.stderr
    assert f"{volume}/vision_exp left in place" in reverted.stdout
    assert inside("two", "verify").returncode == 0
    assert inside("one", "status").returncode == 1
    again = inside("one", "apply")
    assert again.returncode == 0, again.stderr
    assert [inside(name, "verify").returncode for name in ("one", "two")] == [0, 0]
