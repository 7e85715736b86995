"""The folder that the overlay is staged in: made, shared, linked, not writable, strangely named."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import hotfix_rig
import pytest
import sources
from bad_environments import CONFIG, check_refusal, without_privilege
from hotfix_rig import Rig, contents, identity


def test_overlay_root_is_made(rig: Rig) -> None:
    deep = Rig(rig.base)
    answer = hotfix_rig.call(
        ["--root", str(deep.root), "--overlay-root", str(rig.base / "a" / "b"), "apply"],
        rig.environment,
    )
    assert answer.code == 0, answer.err
    assert (rig.base / "a" / "b" / "vision_exp" / "install.py").is_file()


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o757])
def test_overlay_root_that_others_can_write(rig: Rig, mode: int) -> None:
    rig.overlay.mkdir()
    if mode == 0o775:
        os.chown(rig.overlay, -1, 65534) if os.geteuid() == 0 else None
    rig.overlay.chmod(mode)
    before = identity(rig.base)
    answer = rig.run("apply")
    check_refusal(answer, 6, str(rig.overlay))
    assert identity(rig.base) == before


def test_overlay_root_that_is_not_writable(rig: Rig) -> None:
    rig.overlay.mkdir()
    rig.overlay.chmod(0o555)
    before = identity(rig.base)
    check_refusal(without_privilege(rig, "apply"), 6, str(rig.overlay))
    assert identity(rig.base) == before


def test_overlay_root_that_is_a_file(rig: Rig) -> None:
    rig.overlay.write_text("")
    before = identity(rig.base)
    check_refusal(rig.run("apply"), 6, str(rig.overlay))
    assert identity(rig.base) == before


def test_overlay_folder_of_somebody_else(rig: Rig) -> None:
    """A `vision_exp` that this tool did not stage is not overwritten."""
    (rig.overlay / "vision_exp").mkdir(parents=True)
    (rig.overlay / "vision_exp" / "__init__.py").write_text("MINE = True\n")
    before = identity(rig.base)
    answer = rig.run("apply")
    check_refusal(answer, 3, "vision_exp")
    assert identity(rig.base) == before


@pytest.mark.parametrize("kind", ["dangling", "elsewhere"])
def test_overlay_folder_that_is_a_link(rig: Rig, kind: str) -> None:
    elsewhere = rig.base / "elsewhere"
    if kind == "elsewhere":
        elsewhere.mkdir()
    rig.overlay.mkdir()
    (rig.overlay / "vision_exp").symlink_to(elsewhere)
    before = identity(rig.base)
    answer = rig.run("apply")
    check_refusal(answer, 6, f"is a link to {elsewhere}")
    assert ("which is not there" in answer.cause) == (kind == "dangling")
    assert "written by others" not in answer.err
    assert identity(rig.base) == before


def test_overlay_root_that_is_a_link(rig: Rig) -> None:
    elsewhere = rig.base / "elsewhere"
    elsewhere.mkdir()
    rig.overlay.symlink_to(elsewhere)
    answer = rig.run("apply")
    check_refusal(answer, 6, "is a link to")
    assert f"--overlay-root {elsewhere}" in answer.err


@pytest.mark.parametrize("kind", ["link", "file"])
def test_state_folder_of_the_overlay_that_is_not_ours(rig: Rig, kind: str) -> None:
    rig.overlay.mkdir()
    place = rig.overlay / ".vision-exp"
    place.symlink_to(rig.home) if kind == "link" else place.write_text("")
    before = contents(rig.base)
    check_refusal(rig.run("apply"), 6, str(place))
    assert contents(rig.base) == before


def test_a_file_where_the_overlay_goes(rig: Rig) -> None:
    assert rig.run("apply").code == 0
    shutil.rmtree(rig.overlay / "vision_exp")
    (rig.overlay / "vision_exp").write_text("")
    before = identity(rig.base)
    check_refusal(rig.run("apply"), 3, "vision_exp")
    assert identity(rig.base) == before


@pytest.mark.parametrize("kind", ["dangling", "pipe"])
def test_odd_entries_in_the_staged_overlay(rig: Rig, kind: str) -> None:
    """Never opened: a pipe would wait for ever. Revert works, and leaves what it does not know."""
    assert rig.run("apply").code == 0
    malformed = rig.overlay / "vision_exp" / "malformed.py"
    malformed.symlink_to("nowhere") if kind == "dangling" else os.mkfifo(malformed)
    assert rig.spawn("--json", "status").json["state"] == "stale"
    assert rig.spawn("apply").code == (6 if kind == "dangling" else 0)
    assert rig.spawn("revert").code == 0
    assert contents(rig.site) == contents(sources.stock("0.29.0"))


def test_the_folder_of_the_tool_itself_as_overlay_root(rig: Rig, tmp_path: Path) -> None:
    """As when the bundle was unpacked into the overlay root: revert must not eat the tool."""
    tool = tmp_path / "tool"
    for name in ("anchors", "vision_exp"):
        shutil.copytree(hotfix_rig.REPO / name, tool / name)
    shutil.copy(hotfix_rig.HOTFIX, tool)
    for path in [tool, *tool.rglob("*")]:
        path.chmod(0o755)
    shipped = contents(tool / "vision_exp")
    words = ["--root", str(rig.root), "--overlay-root", str(tool)]
    for verb in ("apply", "verify", "revert", "apply", "revert"):
        command = [sys.executable, "-B", str(tool / "hotfix.py"), *words, verb]
        done = subprocess.run(command, env=rig.environment, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
    assert contents(tool / "vision_exp") == shipped
    assert contents(rig.site) == contents(sources.stock("0.29.0"))


@pytest.mark.parametrize(
    "name", ["k\xf6ln", "\U0001f600", "a\nb", 'it\'s "it"', "\udcff", "%s{root}"]
)
def test_names_of_the_overlay_root(rig: Rig, name: str) -> None:
    """What Python reads in the hook is the folder that was staged."""
    root = rig.base / name
    words = ["--root", str(rig.root), "--overlay-root", str(root)]
    assert hotfix_rig.call([*words, "-q", "apply"], rig.environment).code == 0
    roots = [
        ast.literal_eval(keyword.value)
        for node in ast.walk(ast.parse((rig.root / CONFIG).read_bytes()))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "root"
    ]
    assert roots == [str(root)]
    shutil.rmtree(rig.root / ".vision-exp")
    plain = hotfix_rig.call(["--root", str(rig.root), "revert"], rig.environment)
    assert plain.code == 0, plain.err
    assert not root.exists(), "revert without a receipt does not find the overlay"
