"""The overlay's loops over pixels, compiled once in a warm Python and handed to its forks.

A compilation takes some six seconds, and gives the same for the same source. A fork whose overlay
has other sources compiles its own.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

NAME = "vision_exp.image.kernels"
#: What the module's source is made of: itself and the constants that it takes from others.
SOURCES = ("kernels.py", "pixels.py", "resample.py")
REPOSITORY = Path(__file__).resolve().parents[2]


class Compiled(MetaPathFinder, Loader):
    """Finds NAME where its sources are the compiled ones; all else is left to the next finder."""

    def __init__(self, module: ModuleType, sources: list[bytes]) -> None:
        self.module, self.sources = module, sources

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != NAME:
            return None
        found = PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        if found is None or _sources(Path(str(found.origin)).parent) != self.sources:
            return None
        return ModuleSpec(name, self, origin=found.origin)

    def exec_module(self, module: ModuleType) -> None:
        own = vars(module).copy()
        vars(module).update(vars(self.module) | own)


def compiled() -> Compiled:
    """Compiles the repository's, and forgets its package: a fork imports its own."""
    sys.path.insert(0, str(REPOSITORY))
    try:
        module = importlib.import_module(NAME)
    finally:
        sys.path.remove(str(REPOSITORY))
        for name in [each for each in sys.modules if each.partition(".")[0] == "vision_exp"]:
            del sys.modules[name]
    return Compiled(module, _sources(REPOSITORY / "vision_exp" / "image"))


def _sources(folder: Path) -> list[bytes]:
    return [path.read_bytes() if (path := folder / name).is_file() else b"" for name in SOURCES]
