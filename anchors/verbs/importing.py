"""verify --import: the patched modules are imported in a child process."""

from __future__ import annotations

import os
import subprocess
import sys

from anchors.engine.plan import Plan
from anchors.engine.target import Target
from anchors.errors import NO, HotfixError

_LIMIT_S = 300


def check(target: Target, plan: Plan) -> None:
    """Imports every patched module. Raises HotfixError (exit 1) with the child's last line."""
    names = [
        "vllm." + file.path.removesuffix(".py").replace("/", ".")
        for file in plan.files
        if file.after is not None and file.after != file.stock
    ]
    parents = [os.path.dirname(target.root), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", "".join(f"import {name}\n" for name in names)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, parents))},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
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
