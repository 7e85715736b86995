"""`validate` and `preview` start from the command line, and are no part of the overlay."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import hotfix_rig
import pytest
from hotfix_rig import HOTFIX, REPO
from PIL import Image

from anchors import digests
from anchors.engine import fast, overlay
from anchors.verbs import bundle


def _both(folder: Path, verb: str, *words: str) -> subprocess.CompletedProcess[str]:
    """What the verb does from another folder; the module from ours has to do the same."""

    def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-B", *command, *words], cwd=cwd, capture_output=True, text=True
        )

    done = run([str(HOTFIX), verb], folder)
    module = run(["-m", f"vision_exp.{verb}"], REPO)
    assert (done.returncode, done.stdout, done.stderr) == (
        module.returncode,
        module.stdout,
        module.stderr,
    )
    return done


def test_validate(tmp_path: Path) -> None:
    done = _both(tmp_path, "validate", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "exit codes:" in done.stdout and "--api-key" in done.stdout
    out = tmp_path / "a.json"
    done = _both(tmp_path, "validate", "--json", str(out), "--url", "127.0.0.1:9/v1")
    assert done.returncode == 2
    assert done.stderr.startswith("[vision-exp] --url 127.0.0.1:9/v1 has no scheme")
    done = _both(tmp_path, "validate", "--url", "http://127.0.0.1:9/v1", "--json", str(out))
    assert done.returncode == 3 and "no usable server" in done.stderr


@pytest.mark.parametrize("options", [["--json"], ["-v"], ["--root", "x"], ["--color", "auto"]])
@pytest.mark.parametrize("verb", ["validate", "preview"])
def test_an_option_before_a_program_is_refused(verb: str, options: list[str]) -> None:
    """No program would see it, and its answer would be in another form than was asked for."""
    command = [sys.executable, "-B", str(HOTFIX), *options, verb, "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    message, hint = f"options of {verb} stand after it", f"python3 hotfix.py {verb} --help"
    if "--json" in options:
        error = json.loads(done.stdout)["error"]
        assert message in error["message"] and error["hint"] == hint
    else:
        first, last = done.stderr.splitlines()
        assert message in first and last == f"next: {hint}" and not done.stdout


def test_a_closed_output_is_known_to_the_program() -> None:
    command = [sys.executable, "-B", str(HOTFIX), "validate", "--url", "http://127.0.0.1:9/v1"]
    line = f"{shlex.join(command)} >&-"
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True)
    assert done.returncode == 4 and "standard output is closed" in done.stderr


def test_preview(tmp_path: Path) -> None:
    image = tmp_path / "image.png"
    Image.new("RGB", (640, 480)).save(image)
    drawn = tmp_path / "seen.png"
    done = _both(tmp_path, "preview", str(image), "-o", str(drawn))
    assert done.returncode == 0 and "640x480" in done.stdout
    assert drawn.is_file()
    assert _both(tmp_path, "preview", str(tmp_path / "none.png")).returncode == 1
    assert _both(tmp_path, "preview").returncode == 2


def test_a_preview_without_torch_names_the_package() -> None:
    """-S: a Python that has nothing but the standard library."""
    command = [sys.executable, "-S", "-B", str(HOTFIX), "preview"]
    done = subprocess.run([*command, "image.png"], capture_output=True, text=True)
    first, last = done.stderr.splitlines()
    assert done.returncode == 6 and "the package torch is missing" in first
    assert last.startswith("next: python3 -m pip install torch")
    done = subprocess.run([*command, "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "IMAGE" in done.stdout and "--config" in done.stdout


def test_only_what_is_staged_is_in_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "vision_exp"
    shutil.copytree(REPO / "vision_exp", package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(digests, "TOOL_ROOT", str(tmp_path))

    def digest() -> str:
        return overlay.package(fast.read_shipped()).digest

    def change(name: str) -> str:
        with (package / name).open("a") as file:
            file.write("# changed\n")
        return digest()

    before = digest()
    assert change("validate/checks.py") == change("preview.py") == before
    assert change("config.py") != before


def test_the_bundle_has_them_and_the_overlay_has_not() -> None:
    shipped = {f"vision_exp/{path}" for path in fast.read_shipped()}
    left = {path for path in bundle._sources() if path.startswith("vision_exp/")} - shipped
    rooms = sorted(
        path.relative_to(REPO).as_posix() for path in REPO.glob("vision_exp/validate/*.py")
    )
    assert sorted(left) == ["vision_exp/preview.py", *rooms]
    assert "vision_exp/validate/__main__.py" in left


def test_an_overlay_of_an_earlier_build_is_removed(tmp_path: Path) -> None:
    """What is not staged any more was, and counted."""
    rig = hotfix_rig.make(tmp_path / "rig", "0.29.0")
    assert rig.run("apply").code == 0
    (rig.overlay / "vision_exp" / "preview.py").write_text("# of an earlier build\n")
    manifest = rig.overlay / "vision_exp.manifest.json"
    staged = digests.staged_digest(str(rig.overlay / "vision_exp"), unstaged=())
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"digest": staged}))
    assert rig.run("revert").code == 0
    assert not (rig.overlay / "vision_exp").exists()
