"""What `drift` was asked about -> trees on disk: versions, wheels, unpacked trees, checkouts."""

from __future__ import annotations

import os
import re
import sys
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from anchors.engine import fences, native
from anchors.engine.versions import version_key
from anchors.releases import known, wheels

_VERSION = re.compile(r"\d+(\.\d+)+")
_AT_ONCE = 8
#: What zipfile raises for damaged, encrypted or strangely packed archives.
NO_WHEEL = (zipfile.BadZipFile, EOFError, OSError, RuntimeError, ValueError, zlib.error)


@dataclass(frozen=True)
class Tree:
    """One vLLM package folder to judge; `error` says why there is none.

    `fixed` is a key under which a verdict may be kept: content that never changes has one.
    """

    label: str
    root: Path | None
    error: str = ""
    fixed: str = ""

    def read(self, path: str) -> bytes | None:
        """A file's bytes as released, without what this tool added; None where there is none.

        Raises OSError for one that may not be read.
        """
        file = self.root / path if self.root else None
        return fences.split(file.read_bytes()).stock if file and file.is_file() else None


class Cache:
    """Release sources kept between runs, one folder per version and set of needed files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._key = wheels.key()

    def place(self, version: str) -> Path:
        """Where a release lies once it was fetched."""
        return self.folder / "releases" / f"{version}-{self._key}"

    def tree(self, version: str) -> Tree:
        """A fetched release."""
        place = self.place(version)
        return _package(version, place, fixed=place.name)

    def versions(self) -> list[str]:
        """The releases that need no network, oldest first."""
        found = (self.folder / "releases").glob(f"*-{self._key}")
        return sorted((path.name.rpartition("-")[0] for path in found), key=version_key)


def default_cache() -> Path:
    """`VISION_EXP_CACHE`, else a folder of ours in the user's cache folder."""
    named = os.environ.get("VISION_EXP_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(named) if named else Path(base).expanduser() / "vision-exp"


@contextmanager
def collect(arguments: Iterable[str], cache: Cache) -> Iterator[tuple[list[Tree], list[str]]]:
    """Trees in the order asked for, and notes. Raises WheelError: no index and nothing cached."""
    with TemporaryDirectory(prefix="vision-exp-drift-") as scratch:
        asked = [_named(name) for name in arguments]
        if not asked:
            yield _every_release(cache)
            return
        versions = [name for name in asked if _is_version(name)]
        trees = {tree.label: tree for tree in _releases(versions, cache)}
        for place, name in enumerate(asked):
            if name not in trees:
                trees[name] = _from_path(Path(name), Path(scratch) / str(place))
        yield [trees[name] for name in dict.fromkeys(asked)], []


def _named(name: str) -> str:
    """A release as people name it, `v0.28.0` or `latest`, as the index does; else what it was."""
    found = known.named(name)
    return name if found is None or Path(name).exists() else found


def _is_version(name: str) -> bool:
    return _VERSION.fullmatch(name) is not None and not Path(name).exists()


def _every_release(cache: Cache) -> tuple[list[Tree], list[str]]:
    first = version_key(known.versions()[0])
    try:
        listed = [w for w in wheels.releases("vllm") if version_key(w.version) >= first]
    except wheels.WheelError as error:
        kept = cache.versions()
        if not kept:
            raise
        note = f"the package index did not answer ({error}): judged {len(kept)} cached releases"
        return [cache.tree(version) for version in kept], [note]
    return _fetch(listed, cache), []


def _releases(versions: list[str], cache: Cache) -> list[Tree]:
    trees = {v: cache.tree(v) for v in versions if cache.place(v).is_dir()}
    listed: list[wheels.Wheel] = []
    for version in versions:
        if version not in trees:
            try:
                listed += wheels.releases("vllm", [version])
            except wheels.WheelError as error:
                trees[version] = Tree(version, None, str(error))
    trees.update((tree.label, tree) for tree in _fetch(listed, cache))
    return [trees[version] for version in versions]


def _fetch(listed: list[wheels.Wheel], cache: Cache) -> list[Tree]:
    missing = [wheel for wheel in listed if not cache.place(wheel.version).is_dir()]
    done: list[str] = []

    def one(wheel: wheels.Wheel) -> Tree:
        place = cache.place(wheel.version)
        if not place.is_dir():
            try:
                wheels.fetch(wheel, place)
            except (wheels.WheelError, *NO_WHEEL) as error:
                return Tree(wheel.version, None, f"{wheel.filename} could not be read: {error}")
            done.append(wheel.version)
            _progress(f"fetched {len(done)} of {len(missing)} releases")
        return cache.tree(wheel.version)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(one, listed))


def _progress(text: str) -> None:
    print(f"[vision-exp] {text}", file=sys.stderr, flush=True)


def _from_path(path: Path, scratch: Path) -> Tree:
    label = str(path)
    try:
        if path.is_dir():
            return _package(label, path)
        if not path.is_file():
            return Tree(label, None, "no such file, folder or version")
    except OSError as error:
        return Tree(label, None, f"cannot be read: {error}")
    try:
        with zipfile.ZipFile(path) as archive:
            wheels.unpack(archive, scratch, wheels.needed)
    except wheels.WheelError as error:
        return Tree(label, None, str(error))
    except NO_WHEEL as error:
        return Tree(label, None, f"not a readable wheel: {error}")
    return _package(label, scratch)


def _package(label: str, folder: Path, fixed: str = "") -> Tree:
    odd = folder / native.REGISTRY, folder / "vllm" / native.REGISTRY
    if any(path.exists() and not path.is_file() for path in odd):
        return Tree(label, None, f"{native.REGISTRY} is not a file")
    for root in (folder, folder / "vllm"):
        if (root / "__init__.py").is_file() and (root / native.PACKAGE).is_dir():
            return Tree(label, root.resolve(), fixed=fixed)
    if (folder / "vllm" / "__init__.py").is_file() or (folder / "__init__.py").is_file():
        return Tree(label, None, f"a vLLM without {native.PACKAGE}: too old, or not vLLM")
    return Tree(label, None, "no vLLM package in it")
