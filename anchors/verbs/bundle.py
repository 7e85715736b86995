"""`hotfix.py bundle`: the mod as launchers want it, one zip that needs no network where it runs.

The same sources and the same LibCST release give the same bytes: members are sorted and carry one
date and one mode, and LibCST's wheels are fetched as the package index has them.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from anchors import report
from anchors.digests import TOOL_ROOT, sha256
from anchors.errors import HotfixError, environment
from anchors.report import Report

NAME = "deepseek-v4-vision-exp"
LIBCST = "1.9.0"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
LIMIT = 25_000_000

_ROOT_FILES = (
    "run.sh",
    "hotfix.py",
    "Dockerfile",
    "README.md",
    "LICENSE",
    "bench/results/README.md",
)
_FOLDERS = ("anchors", "vision_exp", "docs", "recipes")
# The first date that a zip can hold.
_DATE = (1980, 1, 1, 0, 0, 0)
_MODE = 0o644 << 16


def run(arguments: argparse.Namespace) -> Report:
    """Write the zip. Raises HotfixError (exit 6): no wheels to be had, file not writable."""
    target = Path(arguments.file)
    with TemporaryDirectory(prefix="vision-exp-bundle-") as scratch:
        wheels = _wheels(Path(scratch), Path(arguments.wheels) if arguments.wheels else None)
        part = target.with_name(f".{target.name}.part")
        try:
            _write(part, {**_sources(), **wheels})
            size = part.stat().st_size
            part.replace(target)
        except OSError as error:
            raise environment(
                "bundle-not-written",
                f"{target} cannot be written: {error.strerror}. Nothing was changed.",
                hint="name a file in a folder that exists and is yours",
            ) from error
        finally:
            part.unlink(missing_ok=True)
    digest = sha256(target.read_bytes())
    result = report.blank()
    result.update(verb="bundle", bundle={"path": str(target), "bytes": size, "sha256": digest})
    result["text"] = (
        f"{report.PREFIX} {target}: {size / 1e6:.1f} MB, sha256 {digest}\n"
        f"{report.PREFIX} next: mkdir -p mods && unzip {target} -d mods/{NAME}\n"
    )
    if size > LIMIT:
        result["notes"].append(f"larger than the {LIMIT / 1e6:.0f} MB that launchers copy quickly")
    return result


def _sources() -> dict[str, bytes]:
    """Member name -> bytes of this tool, without dotfiles and compiled files."""
    root = Path(TOOL_ROOT)
    files = [root / name for name in _ROOT_FILES if (root / name).is_file()]
    for folder in _FOLDERS:
        files += [path for path in (root / folder).rglob("*") if path.is_file()]
    names = {path.relative_to(root).as_posix(): path for path in files}
    return {
        name: path.read_bytes()
        for name, path in names.items()
        if "__pycache__" not in name and not any(p.startswith(".") for p in name.split("/"))
    }


def _wheels(scratch: Path, given: Path | None) -> dict[str, bytes]:
    """Member name -> bytes of LibCST's wheels, from a folder or from the package index."""
    if given is None and (Path(TOOL_ROOT) / "wheels").is_dir():
        # A bundle bundles itself again without a network.
        given = Path(TOOL_ROOT) / "wheels"
    if given is None:
        for python in PYTHONS:
            for machine in MACHINES:
                _download(scratch, python, machine)
        given = scratch
    found = {path.name: path for path in given.glob("libcst-*.whl")}
    for python in PYTHONS:
        tag = "cp" + python.replace(".", "")
        for machine in MACHINES:
            pattern = re.compile(rf"libcst-[\d.]+-{tag}-.*manylinux.*_{machine}\.whl")
            if not any(pattern.fullmatch(name) for name in found):
                raise environment(
                    "no-wheel",
                    f"no LibCST wheel for Python {python} on {machine} in {given}. "
                    "Nothing was changed.",
                    hint="leave --wheels out, or fill that folder with pip download",
                )
    return {f"wheels/{name}": path.read_bytes() for name, path in found.items()}


def _download(folder: Path, python: str, machine: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", str(folder)]
    command += ["--implementation", "cp", "--python-version", python]
    for glibc in ("2_28", "2_17", "2014"):
        base = "manylinux" if glibc == "2014" else "manylinux_"
        command += ["--platform", f"{base}{glibc}_{machine}"]
    child = subprocess.run(
        [*command, f"libcst=={LIBCST}"], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if child.returncode:
        cause = (child.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise environment(
            "no-wheel",
            f"LibCST {LIBCST} for Python {python} on {machine} cannot be fetched: {cause}. "
            "Nothing was changed.",
            hint="check the package index: python3 -m pip config debug",
        )


def _write(path: Path, members: dict[str, bytes]) -> None:
    if "run.sh" not in members:
        raise HotfixError(
            "incomplete-tool",
            f"run.sh is missing in {TOOL_ROOT}: this copy of vision-exp is not complete. "
            "Nothing was changed.",
            exit_code=6,
            hint="copy the whole folder again",
        )
    with zipfile.ZipFile(path, "w") as archive:
        for name in sorted(members):
            info = zipfile.ZipInfo(name, _DATE)
            info.create_system = 3
            info.external_attr = _MODE
            # Wheels are compressed already.
            stored = name.endswith(".whl")
            info.compress_type = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
            archive.writestr(info, members[name], compresslevel=None if stored else 9)
        os.fsync(archive.fp.fileno())  # type: ignore[union-attr]
