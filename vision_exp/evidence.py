"""One log line per process that builds a vision model or processor: what is active in it."""

from __future__ import annotations

import logging
import multiprocessing
import os
from typing import Any

from vision_exp import install

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = ("vllm:__version__",)

# A child of vLLM's logger, so that it is shown wherever vLLM's own lines are.
logger = logging.getLogger("vllm.vision_exp")

_logged: set[tuple[int, bool]] = set()


def log_once(builds: str, model_config: Any, vllm_config: Any = None) -> None:
    """Log the evidence line, once per process.

    `builds` is "model" or "processor"; a process without a model has no `vllm_config`, and its
    line names neither routing nor visibility. A model built after a processor adds its own line.
    """
    process, has_model = os.getpid(), vllm_config is not None
    if (process, has_model) in _logged or (process, True) in _logged:
        return
    _logged.add((process, has_model))
    logger.info("%s", line(builds, model_config, vllm_config))


def line(builds: str, model_config: Any, vllm_config: Any = None) -> str:
    """The evidence line, `[vision-exp] active pid=... role=... ... eps=...`."""
    import vllm

    role = f"{multiprocessing.current_process().name}/{builds}"
    routing = seeing = "-"
    if vllm_config is not None:
        from vision_exp.routing import hooks as routing_hooks
        from vision_exp.visibility import hooks as visibility_hooks

        routing = routing_hooks.describe(vllm_config)
        seeing = visibility_hooks.describe(vllm_config)
    eps = getattr(model_config.hf_config, "rms_norm_eps", None)
    state = install.installed
    return (
        f"[vision-exp] active pid={os.getpid()} role={role} vllm={vllm.__version__} "
        f"plan={state.plan[:8]} overlay={state.overlay[:8]} routing={routing} "
        f"visibility={seeing} eps={eps:g}"
    )
