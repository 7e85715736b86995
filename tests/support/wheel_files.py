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
            wheels.fetch(_wheel(project, version), folder, wanted)
    return folder


def _wheel(project: str, version: str) -> wheels.Wheel:
    if "post" not in version:
        (found,) = wheels.releases(project, [version])
        return found
    # `releases` knows final releases alone.
    name = f"{project.replace('-', '_')}-{version}-"
    for filename, url in wheels._listed(wheels._pip_index(), project):
        if filename.startswith(name) and filename.endswith(".whl"):
            return wheels.Wheel(project, version, filename, url)
    raise wheels.WheelError(f"The package index lists no wheel of {project} {version}")
