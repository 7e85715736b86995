"""Real vLLM sources for the tests: the needed files of every official release, never committed.

Run as a script it fetches what the cache lacks.
"""

from __future__ import annotations

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from downloads import downloading

REPO = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("VISION_EXP_TEST_CACHE", REPO / ".cache")).resolve() / "sources"

WITHOUT_DSPARK = ("0.22.0", "0.22.1", "0.23.0", "0.24.0")
WITH_DSPARK = ("0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0")
NATIVE = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")
TEXT_ONLY = WITHOUT_DSPARK + WITH_DSPARK
RELEASES = TEXT_ONLY + NATIVE


def stock(version: str) -> Path:
    """The folder that holds `vllm/` and its dist-info as released. Read it, never write in it."""
    folder = CACHE / version
    if not folder.is_dir():
        fetch_missing((version,))
    return folder


def install(version: str, site_packages: Path) -> Path:
    """Copy a release into `site_packages`, as an installer would; return the package folder."""
    shutil.copytree(stock(version), site_packages, dirs_exist_ok=True)
    return site_packages / "vllm"


def fetch_missing(versions: tuple[str, ...] = RELEASES) -> None:
    """Fetch the releases that the cache lacks, from the index that pip is configured to use."""
    missing = [version for version in versions if not (CACHE / version).is_dir()]
    if not missing:
        return
    from anchors.releases import wheels

    print(f"tests: fetching sources of vllm {', '.join(missing)}", flush=True)
    with downloading(), ThreadPoolExecutor(4) as pool:
        found = wheels.releases("vllm", missing)
        list(pool.map(lambda wheel: wheels.fetch(wheel, CACHE / wheel.version), found))


if __name__ == "__main__":
    sys.path.insert(0, str(REPO))
    fetch_missing()
