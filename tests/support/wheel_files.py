"""Some Python sources of published wheels, fetched once and never committed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import sources
from downloads import downloading

from anchors.releases import wheels

CACHE = sources.CACHE.parent / "wheel-files"


def fetched(project: str, version: str, wanted: Callable[[str], bool], part: str = "") -> Path:
    """The folder with the wanted members of a wheel. One set of files for project and `part`."""
    folder = CACHE / f"{project}-{version}{part}"
    if not folder.is_dir():
        print(f"tests: fetching sources of {project} {version}", flush=True)
        with downloading():
            (wheel,) = wheels.releases(project, [version], posts=True)
            wheels.fetch(wheel, folder, wanted)
    return folder
