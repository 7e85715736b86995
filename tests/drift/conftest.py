"""Drift runs as a user types it, with a cache of its own that starts from the tests' sources."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import sources

from anchors.drift.trees import Cache
from anchors.engine import requirements

REPO = Path(__file__).resolve().parents[2]
CACHE = sources.CACHE

Drift = Callable[..., "tuple[int, dict]"]


def needs() -> tuple[requirements.Requirement, ...]:
    return requirements.collect(str(REPO / "vision_exp"))


def release(version: str) -> Path:
    """A release as drift keeps it; fetched through drift itself where the cache lacks it."""
    place = Cache(CACHE).place(version)
    if not place.is_dir():
        run(version)
    return place


def run(*arguments: str, cache: Path = CACHE, **environment: str) -> tuple[int, dict]:
    """(exit code, `--json` object) of `hotfix.py drift`."""
    child = subprocess.run(
        [sys.executable, str(REPO / "hotfix.py"), "--json", "drift", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "VISION_EXP_CACHE": str(cache), **environment},
        timeout=300,
    )
    assert child.stdout, child.stderr
    return child.returncode, json.loads(child.stdout)


Edit = Callable[[str], str]


def edit_tree(folder: Path, version: str, edits: dict[str, Edit | None]) -> Path:
    """A copy of a release in `folder`; edits: path -> function of its text, None deletes it."""
    shutil.copytree(release(version), folder)
    for path, edit in edits.items():
        file = folder / "vllm" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if edit is None:
            file.unlink()
            continue
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        after = edit(before)
        assert after != before, f"the edit of {path} did nothing"
        file.write_text(after, encoding="utf-8")
    return folder
