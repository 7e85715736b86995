"""Runs every check in a patched tree: child_overlay.py FOLDER RESULT [ONLY].

With ONLY, checks that have it in their names, and in a stock tree whose hooks are called here.
Text-only checkpoints are recorded before the process has seen a Vision-Exp config and after; last,
which of vLLM's functions are wrapped.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import checks
import checks_amd  # noqa: F401
import checks_building  # noqa: F401
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

from vision_exp import install, patching

HOOKED = {
    "config": "vllm.transformers_utils.configs.deepseek_v4",
    "model": "vllm.models.deepseek_v4.nvidia.model",
    "dspark": "vllm.models.deepseek_v4.nvidia.dspark",
    "mtp": "vllm.models.deepseek_v4.nvidia.mtp",
}


def hook(site: str, module: ModuleType) -> None:
    install.install(site, vars(module), plan="by hand", overlay="by hand")


if __name__ == "__main__":
    folder, result, *only = sys.argv[1:]
    if only:
        for site, module in HOOKED.items():
            patching.when_imported(module, partial(hook, site))
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
