"""Runs every check in a patched tree: child_overlay.py FOLDER RESULT [ONLY].

Text-only checkpoints are recorded before the process has seen a Vision-Exp config and after; last,
which of vLLM's functions are wrapped.
"""

from __future__ import annotations

import sys
from pathlib import Path

import checks
import checks_amd  # noqa: F401
import checks_config  # noqa: F401
import checks_images  # noqa: F401
import checks_model  # noqa: F401
import checks_processor  # noqa: F401
import checks_refusals  # noqa: F401
import checks_runner  # noqa: F401
import checks_weights  # noqa: F401
import rig_model
import text_record
import two_ranks  # noqa: F401
import wrapped_functions

if __name__ == "__main__":
    folder, result, *only = sys.argv[1:]
    shared = rig_model.Rig(Path(folder))
    # First, before this process joins a group of ranks or sees a vision config.
    results = checks.run(shared, *only, part="two_ranks")
    before = None if only else text_record.record(shared)
    results |= checks.run(shared, *only)
    after = None if only else text_record.record(shared)
    patched = {} if only else wrapped_functions.record()
    checks.write(result, checks=results, text=before, text_after=after, **patched)
    failed = [name for name, trace in results.items() if trace]
    print("\n".join(f"{name}\n{results[name]}" for name in failed))
    sys.exit(bool(failed))
