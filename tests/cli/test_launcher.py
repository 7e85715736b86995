"""`run.sh` as container launchers call it: no arguments, no TTY, almost no environment."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import hotfix_rig
import pytest
import sources
from hotfix_rig import REPO, contents, identity

from anchors.releases import known

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


def sandbox(*words: str, home: Path) -> subprocess.Popen[str]:
    """`run.sh` as from a terminal: a process group of its own, which Ctrl-C meets as a whole."""
    environment = {k: v for k, v in os.environ.items() if k.startswith("PIP_")}
    base = Path(sys.base_prefix) / "bin"
    environment["PATH"] = f"{base}:/usr/local/bin:/usr/bin:/bin"
    environment["HOME"] = os.environ.get("HOME", "/root")
    return subprocess.Popen(
        ["bash", str(REPO / "run.sh"), *words],
        cwd=home,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_sandbox_on_a_machine_without_vllm_that_is_interrupted_often(tmp_path: Path) -> None:
    """The one command of the README: makes the environment, fetches, applies, verifies, shows."""
    words = ("--sandbox", "a box", "--vllm", "v0.28.0")
    for step, delay in (("1/4", 0.8), ("2/4", 0.3), ("2/4", 0.0), ("3/4", 0.4)):
        child = sandbox(*words, home=tmp_path)
        assert child.stdout and child.stderr
        for line in child.stdout:
            if step in line:
                break
        time.sleep(delay)
        os.killpg(child.pid, signal.SIGINT)
        _, err = child.communicate(timeout=60)
        assert child.returncode == 130, (step, err)
        assert "Traceback" not in err
        assert f"nothing outside {tmp_path / 'a box'} was written" in err
        assert err.splitlines()[-1].startswith("next: bash ")
    out, err = sandbox(*words, home=tmp_path).communicate(timeout=200)
    assert (out.splitlines()[0].count("needs about"), err) == (1, "")
    assert re.search(r"model-hook +applied", out)
    (hook,) = (tmp_path / "a box").rglob("nvidia/model.py")
    assert ">>> vision-exp:model-hook" in hook.read_text()
    # What it says to do next can be pasted, and so can the command that takes it away.
    following = out.splitlines()[-1].removeprefix("next: ").partition("   (")[0]
    shown = subprocess.run(["bash", "-c", following], capture_output=True, text=True, timeout=60)
    assert "\n-# >>> vision-exp:model-hook" in shown.stdout, shown.stderr
    (away,) = re.findall(r"to take it away: (.*)", out)
    subprocess.run(["bash", "-c", away], check=True, cwd=tmp_path)
    assert list((tmp_path / "a box").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT RUN: a network namespace needs root")
def test_no_network_says_so(tmp_path: Path) -> None:
    box = make(tmp_path, libcst=False)
    provide(box.site, "pip")
    answer = box.call(f"unshare -n bash {box.mod}/run.sh")
    assert answer.code == 6
    assert "LibCST is missing" in answer.cause
    assert "no network" in answer.cause
    assert "matching distribution" not in answer.err


def test_an_unknown_release_lists_what_there_is(tmp_path: Path) -> None:
    child = sandbox("--vllm", "0.28", "--sandbox", "x", home=tmp_path)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (2, "")
    assert "vLLM 0.28 is not a release known here. Nothing was changed." in err.splitlines()[0]
    assert ", ".join(known.versions()) in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["latest", "v0.25.1", "0.25.1"])
def test_how_a_release_may_be_named(text: str) -> None:
    assert known.named(text) == (known.newest() if text == "latest" else "0.25.1")


def test_help() -> None:
    done = subprocess.run(["bash", str(REPO / "run.sh"), "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--sandbox DIR [--vllm VERSION]" in done.stdout and "set -" not in done.stdout


@pytest.mark.parametrize(
    "words", [["--sandbox"], ["--other"], ["--sandbox", "x", "--vllm"], ["--vllm", "0.28.0"]]
)
def test_bad_arguments(tmp_path: Path, words: list[str]) -> None:
    command = ["bash", str(REPO / "run.sh"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "usage" in done.stderr
    assert f"next: bash {REPO}/run.sh --help" in done.stderr
    assert not list(tmp_path.iterdir())
