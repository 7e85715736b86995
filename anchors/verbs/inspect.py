"""status, verify and diff: they look, and write nothing."""

from __future__ import annotations

import argparse
import difflib
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from anchors.doctor import machine
from anchors.engine import platforms
from anchors.engine.assess import DONE_STATES, answering, as_report, assess, refuse
from anchors.engine.overlay import Package, package
from anchors.engine.plan import Plan
from anchors.engine.prove import prove
from anchors.engine.target import Target
from anchors.errors import DONE, NO, HotfixError
from anchors.report import Report

_IMPORT_LIMIT_S = 300


def run(arguments: argparse.Namespace, target: Target, shipped: Mapping[str, bytes]) -> Report:
    """Runs `arguments.verb` on `target`. Raises HotfixError for refusals."""
    overlay = package(shipped)
    if arguments.verb == "diff":
        return _diff(arguments, target, overlay)
    with answering():
        return {"status": _status, "verify": _verify}[arguments.verb](arguments, target, overlay)


def _status(arguments: argparse.Namespace, target: Target, overlay: Package) -> Report:
    found = assess(target, overlay, arguments.overlay_root)
    if found.needs_writing:
        prove(found.plan)  # what apply would refuse is not called pristine
    result = as_report(found, "status")
    if found.state == "superseded":
        result["notes"] += machine.notes_on_native(target.root)
    result["exit"] = DONE if result["state"] in DONE_STATES else NO
    return result


def _verify(arguments: argparse.Namespace, target: Target, overlay: Package) -> Report:
    """Re-derives everything from the bytes and proves it; exit 1 where that does not hold."""
    found = assess(target, overlay, arguments.overlay_root, trust_receipt=False)
    result = as_report(found, "verify")
    result["exit"] = DONE if found.state in DONE_STATES else NO
    if found.state in ("applied", "applied-unrecorded"):
        prove(found.plan)
        if arguments.imports:
            _check_imports(found.plan)
    return result


def _check_imports(plan: Plan) -> None:
    """Imports every patched module of this build's platform in a child.

    Raises HotfixError (exit 1) with its last line.
    """
    names = [
        "vllm." + file.path.removesuffix(".py").replace("/", ".")
        for file in plan.files
        if file.after not in (None, file.stock) and platforms.imports(plan.platform, file.path)
    ]
    parents = [os.path.dirname(plan.target.root), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", "".join(f"import {name}\n" for name in names)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, parents))},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_IMPORT_LIMIT_S,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
        raise HotfixError(
            "import-failed",
            f"the patched modules cannot be imported: {lines[-1]}",
            exit_code=NO,
            context=tuple(lines[-6:-1]),
            hint=f"{sys.executable} -c 'import {names[0]}'",
        )


def _diff(arguments: argparse.Namespace, target: Target, overlay: Package) -> Report:
    found = assess(target, overlay, arguments.overlay_root)
    if not arguments.reverse:
        refuse(found)
    difference = unified_diff(found.plan, reverse=arguments.reverse, context=arguments.unified)
    result = as_report(found, "diff")
    result["diff"] = difference.text
    result["text"] = difference.stat if arguments.stat else difference.text
    result["exit"] = NO if arguments.exit_code and difference.text else DONE
    return result


@dataclass(frozen=True)
class Diff:
    """`text` is the unified diff, "" where nothing changes; `stat` one line per file."""

    text: str
    stat: str


def unified_diff(plan: Plan, *, reverse: bool, context: int) -> Diff:
    """From the bytes as they are to what apply (or revert, with `reverse`) makes of them."""
    chunks = []
    stats = []
    for file in plan.files:
        wanted = file.stock if reverse else file.after
        if file.current is None or wanted is None or file.current == wanted:
            continue
        # Undecodable bytes and carriage returns come through as they are.
        old, new = _lines(file.current), _lines(wanted)
        lines = list(difflib.unified_diff(old, new, f"a/{file.path}", f"b/{file.path}", n=context))
        chunks += [
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in lines
        ]
        added = sum(line.startswith("+") for line in lines) - 1
        removed = sum(line.startswith("-") for line in lines) - 1
        stats.append(f" {file.path} | +{added} -{removed}\n")
    return Diff("".join(chunks), "".join(stats))


def _lines(data: bytes) -> list[str]:
    parts = data.decode("utf-8", "surrogateescape").split("\n")
    return [f"{part}\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])
