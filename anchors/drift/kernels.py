"""FlashInfer judged as vLLM is: does its SM12x kernel still take the rows of images?

What is looked at is the table that vLLM and the start of this hotfix ask (docs/machines.md).
"""

from __future__ import annotations

import os
import re
import shlex
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from anchors.drift.trees import NO_WHEEL, Cache
from anchors.drift.verdict import APPLIES, DRIFTED, NOT_APPLICABLE
from anchors.engine.versions import version_key
from anchors.releases import flashinfer, wheels

COLUMN = "sm120-table"
PROJECT = "flashinfer-python"
#: The first FlashInfer with the table, and the one before it, with which vLLM 0.25 came.
FIRST, BEFORE = "0.6.14", "0.6.13"
#: Keys of an image's row; query heads of one rank; keys of a draft's row, by vLLM's release.
IMAGE_KEYS, HEADS, DRAFT_KEYS = 512, (8, 16, 32, 64), (192, 256)
_NEEDED = re.compile(
    r"flashinfer/(__init__|mla/__init__|mla/_sparse_mla_sm120.*)\.py|[^/]+\.dist-info/METADATA"
)
_NAMED = re.compile(r"flashinfer(?:[-_]python)?(?:[-=]=?(\d[\w.]*))?")
_EXPECTED = f"{flashinfer.TABLE} in {flashinfer.ASKED}: a set of (heads, keys), or a rule"

#: One release of FlashInfer in the `--json` result, with the keys of a tree of vLLM.
Entry = dict[str, Any]


def is_meant(name: str) -> bool:
    """Whether an argument of `drift` is FlashInfer: `flashinfer`, `flashinfer==0.7.4`, a wheel or
    a folder of it."""
    if _NAMED.fullmatch(name) and not os.path.exists(name):
        return True
    base = os.path.basename(name.rstrip("/"))
    alone = not os.path.isdir(os.path.join(name, "vllm"))  # else it is a vLLM's site-packages
    inside = alone and os.path.isdir(os.path.join(name, "flashinfer"))
    return base.startswith("flashinfer_python-") or inside


def judge(names: list[str], cache: Cache, say: Callable[[str], None]) -> list[Entry]:
    """Entries for what was named, for every release from 0.6.13 on where `flashinfer` is.

    Raises WheelError: there is no index.
    """
    entries: list[Entry] = []
    for name in names:
        match = _NAMED.fullmatch(name) if not os.path.exists(name) else None
        if match is None:
            entries.append(_from_path(name))
            continue
        wanted = [match[1]] if match[1] else None
        kept = _place(cache, match[1]) if match[1] else None
        if kept is not None and kept.is_dir():
            entries.append(assess(f"flashinfer {match[1]}", str(kept)))
            continue
        for wheel in wheels.releases(PROJECT, wanted, posts=True):
            if version_key(wheel.version) >= version_key(BEFORE):
                entries.append(_fetched(wheel, cache, say))
    return entries


def cached(cache: Cache) -> list[Entry]:
    """Entries for the releases that need no network."""
    places = (cache.folder / "flashinfer").glob("[0-9]*")
    found = sorted(places, key=lambda place: version_key(place.name))
    return [assess(f"flashinfer {place.name}", str(place)) for place in found]


def assess(label: str, site_packages: str) -> Entry:
    """Judge the FlashInfer in a folder. Its finding has drifted where image rows have no kernel."""
    found = flashinfer.installed(site_packages)
    finding = _finding(found, site_packages)
    if finding["verdict"] == DRIFTED:
        again = f"python3 hotfix.py drift {_argument(label)}"
        finding |= {
            "where": f"{flashinfer.ASKED}.py",
            "expected": _EXPECTED,
            "candidates": [],
            "diff": "",
            "since": "",
            "last_good": "",
            "next": "mend anchors/releases/flashinfer.py and sm120_table of "
            f"vision_exp/visibility/support.py, then: {again}",
        }
    return {"tree": label, "verdict": finding["verdict"], "error": "", "findings": [finding]}


def _argument(label: str) -> str:
    """What names the same on the command line."""
    release = label.removeprefix("flashinfer ")
    return f"flashinfer=={release}" if release != label else shlex.quote(label)


def _finding(found: flashinfer.FlashInfer, folder: str) -> Entry:
    finding = {"id": COLUMN, "file": flashinfer.ASKED, "expected": "", "found": ""}
    if found.form == "none" and found.version and version_key(found.version) < version_key(FIRST):
        detail = "no sparse MLA for SM12x: the text-only model does not start there either"
        return {**finding, "verdict": NOT_APPLICABLE, "detail": detail}
    lost = ""
    if found.form in ("none", "unknown"):
        lost = "no such table" if found.form == "none" else "a table that cannot be read"
    elif not _binds(folder):
        lost = f"{flashinfer.ASKED} does not bind {flashinfer.TABLE}"
    elif not found.takes(HEADS, IMAGE_KEYS):
        lost = f"no kernel for {IMAGE_KEYS} keys with {' or '.join(map(str, HEADS))} heads"
    if lost:
        return {**finding, "verdict": DRIFTED, "detail": lost, "found": lost}
    drafts = [str(keys) for keys in DRAFT_KEYS if found.takes(HEADS, keys)]
    form = "a rule, which only a start can ask" if found.form == "rule" else "a set of pairs"
    detail = f"{form}; rows of a draft with {' or '.join(drafts) or 'no'} keys"
    return {**finding, "verdict": APPLIES, "detail": detail}


def _binds(folder: str) -> bool:
    """Whether the module that is asked has the table's name: its own, or imported."""
    for place in (f"{flashinfer.ASKED}/__init__.py", f"{flashinfer.ASKED}.py"):
        path = Path(folder, place)
        if path.is_file():
            return (
                re.search(rf"^\s*{flashinfer.TABLE}\b", path.read_text("utf-8"), re.M) is not None
            )
    return False


def _place(cache: Cache, version: str) -> Path:
    return cache.folder / "flashinfer" / version


def _fetched(wheel: wheels.Wheel, cache: Cache, say: Callable[[str], None]) -> Entry:
    place, label = _place(cache, wheel.version), f"flashinfer {wheel.version}"
    if not place.is_dir():
        try:
            wheels.fetch(wheel, place, lambda name: _NEEDED.fullmatch(name) is not None)
        except (wheels.WheelError, *NO_WHEEL) as error:
            return _unread(label, f"{wheel.filename} could not be read: {error}")
        say(f"fetched {label}")
    return assess(label, str(place))


def _from_path(name: str) -> Entry:
    if os.path.isdir(name):
        return assess(name, name)
    with TemporaryDirectory(prefix="vision-exp-drift-") as scratch:
        try:
            with zipfile.ZipFile(name) as archive:
                wanted = lambda member: _NEEDED.fullmatch(member) is not None  # noqa: E731
                wheels.unpack(archive, Path(scratch), wanted)
        except (wheels.WheelError, *NO_WHEEL) as error:
            return _unread(name, f"not a readable wheel: {error}")
        return assess(name, scratch)


def _unread(label: str, error: str) -> Entry:
    return {"tree": label, "verdict": "error", "error": error, "findings": []}
