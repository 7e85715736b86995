"""The bundle is what launchers want, and does the whole job without pip and without network."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import sources

from .conftest import make

pytestmark = pytest.mark.xdist_group("bundle")


def test_contents(bundle: Path) -> None:
    with zipfile.ZipFile(bundle) as archive:
        members = {info.filename: info for info in archive.infolist()}
    assert bundle.stat().st_size < 25_000_000
    assert {"run.sh", "hotfix.py", "vision_exp/install.py", "anchors/sites/draft.py"} <= set(
        members
    )
    assert not [name for name in members if "/." in f"/{name}" or "__pycache__" in name]
    assert not [name for name in members if name.startswith("tests/")]
    wheels = {name for name in members if name.endswith(".whl")}
    found = {re.search(r"-(cp\d+)-.*_(x86_64|aarch64)\.whl", name).groups() for name in wheels}  # type: ignore[union-attr]
    assert found == {
        (python, machine)
        for python in ("cp310", "cp311", "cp312", "cp313")
        for machine in ("x86_64", "aarch64")
    }


def test_same_bytes_again_also_from_its_own_wheels(bundle: Path, mod: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.zip"
    assert make(again, "--wheels", str(mod / "wheels")).returncode == 0
    assert again.read_bytes() == bundle.read_bytes()
    # The unpacked mod bundles itself.
    command = [sys.executable, str(mod / "hotfix.py"), "bundle", str(again)]
    assert subprocess.run(command, capture_output=True, timeout=120).returncode == 0
    assert again.read_bytes() == bundle.read_bytes()


def test_a_missing_wheel_is_refused_and_nothing_is_left(mod: Path, tmp_path: Path) -> None:
    next((mod / "wheels").glob("*cp312*aarch64*")).unlink()
    target = tmp_path / "out" / "short.zip"
    target.parent.mkdir()
    done = make(target, "--wheels", str(mod / "wheels"))
    assert done.returncode == 6
    assert "no LibCST wheel for Python 3.12 on aarch64" in done.stderr.splitlines()[0]
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize("place", ["absent/x.zip", "file/x.zip", "folder"])
def test_an_unwritable_target_is_refused_before_anything_is_fetched(
    tmp_path: Path, place: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    done = make(tmp_path / place)
    assert (done.returncode, done.stdout) == (6, "")
    assert "cannot be written" in done.stderr.splitlines()[0]


def test_progress_and_the_next_command_with_a_name_that_needs_quoting(
    mod: Path, tmp_path: Path
) -> None:
    target = tmp_path / "it's a mod.zip"
    done = make(target, "--wheels", str(mod / "wheels"))
    first, *_, last = done.stdout.splitlines()
    assert first == f"[vision-exp] making {target}: up to 25 MB, twice that while it works"
    subprocess.run(["bash", "-c", last.removeprefix("next: ")], cwd=tmp_path, check=True)
    assert (tmp_path / "mods/deepseek-v4-vision-exp/hotfix.py").is_file()
    told = make(target, "--wheels", str(mod / "wheels"), "--json")
    assert json.loads(told.stdout)["next"] == last.removeprefix("next: ")


def test_the_unpacked_mod_does_the_job_without_pip_and_network(mod: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    sources.install("0.29.0", site)
    call = f"cd {mod} && chmod +x run.sh && ./run.sh"
    offline = ["unshare", "-n"]
    if not shutil.which("unshare") or subprocess.run([*offline, "true"]).returncode:
        # pip is absent and no proxy is set: the index is out of reach all the same.
        offline = []
    overlay = f"VISION_EXP_OVERLAY_ROOT={tmp_path / 'overlay'}"
    path, home = f"PATH={venv / 'bin'}:/usr/bin:/bin", f"HOME={tmp_path / 'home'}"
    command = [*offline, "env", "-i", path, home, overlay, "bash", "-c", call]
    first = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert first.returncode == 0, first.stderr
    assert re.search(r"model-hook +applied", first.stdout)
    second = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert second.returncode == 0, second.stderr
    assert "nothing was written" in second.stdout
    doctor = [*command[:-1], f"cd {mod} && python3 hotfix.py doctor && python3 hotfix.py verify"]
    told = subprocess.run(doctor, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert told.returncode == 0, told.stderr
    assert "LibCST is missing" not in told.stdout
    assert "libcst" not in {path.name for path in site.iterdir()}
