"""`run.sh` as container launchers call it: no arguments, no TTY, almost no environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import hotfix_rig
import pytest
import sources
from hotfix_rig import REPO, contents, identity

SHIPPED = ("hotfix.py", "run.sh", "anchors", "vision_exp", "README.md")
LAUNCHER_CALL = "export WORKSPACE_DIR=$PWD && cd {mod} && chmod +x run.sh && ./run.sh"


@dataclass(frozen=True)
class Container:
    """A virtual environment with a vLLM in it, and the mod copied as a launcher copies it."""

    base: Path

    @property
    def mod(self) -> Path:
        return self.base / "workspace" / "mods" / "deepseek-v4-vision-exp"

    @property
    def python(self) -> Path:
        return self.base / "env" / "bin" / "python3"

    @property
    def site(self) -> Path:
        version = "python{}.{}".format(*sys.version_info[:2])
        return self.base / "env" / "lib" / version / "site-packages"

    @property
    def overlay(self) -> Path:
        return self.base / "opt"

    def call(self, line: str | None = None, **extra: str) -> hotfix_rig.Answer:
        """`env -i bash -c LINE` from the container's working folder, standard input closed."""
        environment = {
            "PATH": f"{self.python.parent}:/usr/bin:/bin",
            "HOME": str(self.base / "root"),
            "VISION_EXP_OVERLAY_ROOT": str(self.overlay),
            **extra,
        }
        line = line or LAUNCHER_CALL.format(mod=self.mod)
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.base / "workspace",
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        return hotfix_rig.Answer(done.returncode, done.stdout, done.stderr)


def provide(site: Path, *names: str) -> None:
    """Link installed distributions into another environment of the same Python."""
    for name in names:
        for file in distribution(name).files or ():
            top = Path(file.parts[0])
            target = site / top
            if ".." not in file.parts and not target.exists():
                target.symlink_to(Path(str(distribution(name).locate_file(top))))


def make(base: Path, version: str | None = "0.29.0", *, libcst: bool = True) -> Container:
    box = Container(base)
    venv.create(base / "env", with_pip=False, symlinks=True)
    (base / "root").mkdir()
    box.overlay.mkdir()
    if version:
        sources.install(version, box.site)
    if libcst:
        provide(box.site, "libcst", "pyyaml-ft" if sys.version_info[:2] == (3, 13) else "pyyaml")
    for name in SHIPPED:
        source, target = REPO / name, box.mod / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            no_dotfiles = shutil.ignore_patterns("__pycache__", ".*")
            shutil.copytree(source, target, ignore=no_dotfiles, copy_function=shutil.copyfile)
        else:
            shutil.copyfile(source, target)
    return box


def test_the_launchers_exact_call(tmp_path: Path) -> None:
    box = make(tmp_path)
    stock = contents(box.site)
    mod = contents(box.mod)
    answer = box.call()
    assert answer.code == 0, answer.err
    assert answer.err == ""
    assert "\x1b" not in answer.out
    assert (box.overlay / "vision_exp" / "install.py").is_file()
    assert contents(box.site) != stock
    written = {name for name in contents(box.mod) if name not in mod}
    assert not written, "the mod's own folder was written to"

    before = identity(box.base / "env")
    again = box.call()
    assert (again.code, again.err) == (0, "")
    assert identity(box.base / "env") == before


def test_each_refusal_passes_its_exit_code_on(tmp_path: Path) -> None:
    box = make(tmp_path)
    model = box.site / "vllm/models/deepseek_v4/nvidia/model.py"
    model.write_text(model.read_text().replace("class DeepseekV4ForCausalLM", "class Other"))
    before = contents(box.site)
    answer = box.call()
    assert answer.code == 3
    assert "model-hook" in answer.err[:500]
    assert contents(box.site) == before


def test_release_that_serves_the_model_itself(tmp_path: Path) -> None:
    box = make(tmp_path, "0.31.0")
    before = contents(box.site)
    answer = box.call()
    assert answer.code == 0, answer.err
    assert "DeepseekV4ForConditionalGeneration" in answer.out
    assert contents(box.site) == before


def test_no_vllm(tmp_path: Path) -> None:
    answer = make(tmp_path, None).call()
    assert answer.code == 6
    assert "vllm" in answer.cause.lower()


def test_no_python(tmp_path: Path) -> None:
    box = make(tmp_path)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "chmod", "dirname", "mktemp", "rm", "uname"):
        (tools / name).symlink_to(shutil.which(name) or "")
    answer = box.call(PATH=str(tools))
    assert answer.code == 6
    assert "python3" in answer.cause


@pytest.mark.parametrize("folder", ["/", "elsewhere"])
def test_any_working_folder(tmp_path: Path, folder: str) -> None:
    box = make(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    answer = box.call(f"cd {tmp_path / folder} && bash {box.mod}/run.sh")
    assert answer.code == 0, answer.err


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_read_only_own_folder(tmp_path: Path) -> None:
    box = make(tmp_path)
    mount = f"mount --bind {box.mod} {box.mod} && mount -o remount,bind,ro {box.mod}"
    answer = box.call(f"unshare -m bash -c '{mount} && bash {box.mod}/run.sh'")
    assert answer.code == 0, answer.err


def test_libcst_from_a_bundled_wheel(tmp_path: Path, libcst_wheels: Path) -> None:
    box = make(tmp_path, libcst=False)
    shutil.copytree(libcst_wheels, box.mod / "wheels")
    answer = box.call(PIP_NO_INDEX="1")
    assert answer.code == 0, answer.err
    assert not list(box.site.glob("libcst*")), "the serving environment got a new package"


def test_libcst_from_the_index(tmp_path: Path) -> None:
    box = make(tmp_path, libcst=False)
    provide(box.site, "pip")
    home = Path(os.environ.get("HOME", "/root"))
    configuration = {k: v for k, v in os.environ.items() if k.startswith("PIP_")}
    user_file = home / ".config" / "pip" / "pip.conf"
    if user_file.exists():
        configuration["PIP_CONFIG_FILE"] = str(user_file)
    answer = box.call(**configuration)
    assert answer.code == 0, answer.err


def test_libcst_nowhere(tmp_path: Path) -> None:
    box = make(tmp_path, libcst=False)
    before = contents(box.site)
    answer = box.call(PIP_NO_INDEX="1")
    assert answer.code == 6
    assert "LibCST" in answer.cause
    assert contents(box.site) == before


def test_an_applied_tree_needs_no_libcst(tmp_path: Path) -> None:
    box = make(tmp_path)
    assert box.call().code == 0
    for name in ("libcst", "yaml"):
        (box.site / name).unlink()
    answer = box.call(PIP_NO_INDEX="1")
    assert answer.code == 0, answer.err


def test_sandbox_on_a_machine_without_vllm(tmp_path: Path) -> None:
    """The one command of the README: makes the environment, fetches, applies, verifies, shows."""
    environment = {k: v for k, v in os.environ.items() if k.startswith("PIP_")}
    environment |= {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": os.environ.get("HOME", "/root")}
    base = Path(sys.base_prefix) / "bin"
    environment["PATH"] = f"{base}:{environment['PATH']}"
    for _ in range(2):
        done = subprocess.run(
            ["bash", str(REPO / "run.sh"), "--sandbox", str(tmp_path / "box"), "--vllm", "0.28.0"],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert "model-hook" in done.stdout
        assert "applied" in done.stdout
    (hook,) = (tmp_path / "box").rglob("nvidia/model.py")
    assert ">>> vision-exp:model-hook" in hook.read_text()


@pytest.mark.parametrize("words", [["--sandbox"], ["--other"], ["--sandbox", "x", "--vllm"]])
def test_bad_arguments(tmp_path: Path, words: list[str]) -> None:
    command = ["bash", str(REPO / "run.sh"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "usage" in done.stderr
    assert not list(tmp_path.iterdir())
