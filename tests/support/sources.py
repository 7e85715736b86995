"""Real vLLM sources for the tests: the needed files of every official release, never committed.

Run as a script, with the repository's root on PYTHONPATH, it fetches what the cache lacks.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from downloads import downloading

from anchors.drift.trees import Cache
from anchors.releases import known, wheels

REPO = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("VISION_EXP_TEST_CACHE", REPO / ".cache")).resolve() / "drift"

WITHOUT_DSPARK = known.versions(known.WITHOUT_DSPARK)
WITH_DSPARK = known.versions(known.WITH_DSPARK)
NATIVE = known.versions(known.NATIVE)
TEXT_ONLY = WITHOUT_DSPARK + WITH_DSPARK
RELEASES = known.versions()


def stock(version: str) -> Path:
    """The folder that holds `vllm/` and its dist-info as released. Read it, never write in it."""
    if not folder(version).is_dir():
        fetch_missing((version,))
    return folder(version)


def folder(version: str) -> Path:
    """Where a release lies, as `drift` keeps it: elsewhere once other files of it are needed."""
    return Cache(CACHE).place(version)


def install(version: str, site_packages: Path) -> Path:
    """Copy a release into `site_packages`, as an installer would; return the package folder."""
    shutil.copytree(stock(version), site_packages, dirs_exist_ok=True)
    return site_packages / "vllm"


def fetch_missing(versions: tuple[str, ...] = RELEASES) -> None:
    """Fetch the releases that the cache lacks, from the index that pip is configured to use."""
    missing = [version for version in versions if not folder(version).is_dir()]
    if not missing:
        return
    print(f"tests: fetching sources of vllm {', '.join(missing)}", flush=True)
    with downloading(), ThreadPoolExecutor(4) as pool:
        found = wheels.releases("vllm", missing)
        list(pool.map(lambda wheel: wheels.fetch(wheel, folder(wheel.version)), found))


if __name__ == "__main__":
    fetch_missing()
