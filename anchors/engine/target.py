"""Finds the installed vLLM without importing it."""

from __future__ import annotations

import os
import re
import shlex
import sys

from anchors.errors import environment

ENVIRONMENT_NAMES = ("VLLM_PACKAGE_ROOT", "VLLM_PACKAGE_DIR")
_HINT = "name the package folder: python3 hotfix.py --root /path/to/site-packages/vllm status"


class Target:
    """An installed vLLM package: `root` (real path), `version` (None where unknown), `found_by`."""

    __slots__ = ("found_by", "root", "version")

    def __init__(self, root: str, version: str | None, found_by: str) -> None:
        self.root = root
        self.version = version
        self.found_by = found_by


def discover(root: str | None) -> Target:
    """The vLLM to work on: `root`, the two environment variables, then this interpreter's path.

    Raises HotfixError (exit 6): none, several, a namespace package, a folder that is no vLLM.
    """
    named = [("--root", root)] + [(name, os.environ.get(name)) for name in ENVIRONMENT_NAMES]
    for found_by, path in named:
        if path:
            return _checked(path, found_by)
    return _checked(_on_path(), "python path")


def _checked(path: str, found_by: str) -> Target:
    real = os.path.realpath(path)
    if not os.path.isdir(real):
        raise environment(
            "no-vllm",
            f"no vLLM at {path} ({found_by}): not a folder. Nothing was changed.",
            hint=_HINT,
            state="missing",
        )
    if not os.path.isfile(os.path.join(real, "__init__.py")):
        inner = os.path.join(path, "vllm")
        is_parent = os.path.isfile(os.path.join(inner, "__init__.py"))
        raise environment(
            "no-vllm",
            f"{path} ({found_by}) is not a vLLM package: it has no __init__.py. "
            "Nothing was changed.",
            hint=f"python3 hotfix.py --root {inner} status" if is_parent else _HINT,
            state="missing",
        )
    return Target(real, _version(real), found_by)


def _on_path() -> str:
    import importlib.util

    try:
        spec = importlib.util.find_spec("vllm")
    except (ImportError, ValueError) as error:
        raise environment(
            "no-vllm",
            f"vLLM cannot be looked up in {sys.executable}: {error}. Nothing was changed.",
            hint=_HINT,
            state="missing",
        ) from error
    if spec is None:
        raise environment(
            "no-vllm",
            f"no vLLM in {sys.executable}. Nothing was changed.",
            hint=f"run with the Python that will serve, or {_HINT}",
            state="missing",
        )
    if spec.origin is None:
        raise environment(
            "namespace-package",
            "vllm is a namespace package here, a folder without __init__.py: not an installed "
            "vLLM. Nothing was changed.",
            *(str(place) for place in spec.submodule_search_locations or ()),
            hint=_HINT,
            state="missing",
        )
    found = [os.path.dirname(spec.origin)]
    found += [
        os.path.join(entry, "vllm")
        for entry in sys.path
        if os.path.isfile(os.path.join(entry, "vllm", "__init__.py"))
    ]
    for path in found:
        if os.path.islink(path):
            raise environment(
                "vllm-is-link",
                f"{path} is a link to {os.path.realpath(path)}, which other environments may use. "
                "Nothing was changed.",
                hint="to patch it for all of them, name it: "
                f"python3 hotfix.py --root {shlex.quote(os.path.realpath(path))} apply",
            )
    distinct = list(dict.fromkeys(os.path.realpath(path) for path in found))
    if len(distinct) > 1:
        raise environment(
            "several-vllms",
            f"{len(distinct)} vLLM packages are on this Python's path; which one serves is not "
            "ours to guess. Nothing was changed.",
            *distinct,
            hint=f"python3 hotfix.py --root {distinct[0]} status",
        )
    return distinct[0]


def shadow(root: str) -> str | None:
    """The vLLM that `python3 -m` takes in the working folder instead of `root`, if there is one."""
    try:
        found = os.path.realpath(os.path.join(os.getcwd(), "vllm"))
    except FileNotFoundError:  # the folder is gone
        return None
    is_package = os.path.isfile(os.path.join(found, "__init__.py"))
    return found if is_package and found != root else None


def _version(root: str) -> str | None:
    """Version from `_version.py`, else from a dist-info folder beside the package."""
    try:
        with open(os.path.join(root, "_version.py"), encoding="utf-8") as file:
            match = re.search(r"^__version__\b[^'\"\n]*['\"]([^'\"]+)", file.read(), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        match = None
    if match:
        return match.group(1)
    try:
        names = sorted(os.listdir(os.path.dirname(root)))
    except OSError:
        return None
    for name in names:
        info = re.fullmatch(r"vllm(?:_cpu)?-(.+)\.dist-info", name)
        if info:
            return info.group(1)
    return None
