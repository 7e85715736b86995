"""Which of two versions is later."""

from __future__ import annotations

import re

from anchors import __version__

_VERSION = re.compile(r"v?(\d+(?:\.\d+)*)(?:[-_.]?(dev|a|b|rc|post)(\d*))?")
_PHASES = ("dev", "a", "b", "rc", "", "post")


def version_key(version: str) -> tuple[tuple[int, ...], int, int]:
    """Sorts versions as Python's packaging rules do: `0.1.0rc1` before `0.1.0`, which is `0.1`.

    A local part (`+cu130`) counts for nothing, and text that is no version is before all others.
    Rules: https://packaging.python.org/en/latest/specifications/version-specifiers/
    """
    found = _VERSION.match(version)
    if found is None:
        return (), 0, 0
    numbers = [int(part) for part in found.group(1).split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers), _PHASES.index(found.group(2) or ""), int(found.group(3) or 0)


def is_newer(version: str) -> bool:
    """Whether `version` is later than this tool's."""
    return version_key(version) > version_key(__version__)
