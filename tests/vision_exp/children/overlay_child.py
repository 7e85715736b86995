"""Runs every check in a patched tree: overlay_child.py FOLDER RESULT [ONLY]."""

from __future__ import annotations

import sys
from pathlib import Path

import checks
import checks_config  # noqa: F401
import checks_model  # noqa: F401
import checks_processor  # noqa: F401
import rig

if __name__ == "__main__":
    folder, result, *only = sys.argv[1:]
    results = checks.run(rig.Rig(Path(folder)), *only)
    checks.write(result, checks=results)
    failed = [name for name, trace in results.items() if trace]
    print("\n".join(f"{name}\n{results[name]}" for name in failed))
    sys.exit(bool(failed))
