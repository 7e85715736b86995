"""One log line per process that builds a vision model or processor: what is active in it."""

from __future__ import annotations

import logging
import multiprocessing
import os
from typing import Any

from vision_exp import install

# A child of vLLM's logger, so that it is shown wherever vLLM's own lines are.
logger = logging.getLogger("vllm.vision_exp")

_logged: set[int] = set()


def log_once(builds: str, model_config: Any, vllm_config: Any = None) -> None:
    """Log the evidence line, once per process.

    `builds` is "model" or "processor"; a process without a model has no `vllm_config`, and its
    line names neither routing nor visibility.
    """
    if os.getpid() in _logged:
        return
    _logged.add(os.getpid())
    logger.info("%s", line(builds, model_config, vllm_config))


def line(builds: str, model_config: Any, vllm_config: Any = None) -> str:
    """The evidence line, `[vision-exp] active pid=... role=... ... eps=...`."""
    import vllm

    role = f"{multiprocessing.current_process().name}/{builds}"
    routing = visibility = "-"
    if vllm_config is not None:
        from vision_exp import routing_wiring
        from vision_exp import visibility as visibility_module

        routing = routing_wiring.describe(vllm_config)
        visibility = visibility_module.describe(vllm_config)
    eps = getattr(model_config.hf_config, "rms_norm_eps", None)
    state = install.installed
    return (
        f"[vision-exp] active pid={os.getpid()} role={role} vllm={vllm.__version__} "
        f"plan={state.plan[:8]} overlay={state.overlay[:8]} routing={routing} "
        f"visibility={visibility} eps={eps:g}"
    )
