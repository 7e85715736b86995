"""One log line per process that builds a vision model or processor: what is active in it."""

from __future__ import annotations

import logging
import multiprocessing
import os
from typing import Any

from vision_exp import install

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm:__version__",
    "vllm.platforms.interface:Platform.is_rocm",
    "vllm.platforms:current_platform",
)

# A child of vLLM's logger, so that it is shown wherever vLLM's own lines are.
logger = logging.getLogger("vllm.vision_exp")

_logged: set[tuple[int, bool]] = set()


def log_once(
    builds: str, model_config: Any, *, routing: str | None = None, visibility: str | None = None
) -> None:
    """Log the evidence line, once per process.

    `builds` is "model" or "processor"; a process without a model has neither routing nor
    visibility to name. A model built after a processor adds its own line.
    """
    process, has_model = os.getpid(), routing is not None
    if (process, has_model) in _logged or (process, True) in _logged:
        return
    _logged.add((process, has_model))
    logger.info("%s", line(builds, model_config, routing or "-", visibility or "-"))


def line(builds: str, model_config: Any, routing: str, visibility: str) -> str:
    """The evidence line, `[vision-exp] active pid=... role=... ... eps=...`, on ROCm with
    `platform=`."""
    import vllm
    from vllm.platforms import current_platform

    role = f"{multiprocessing.current_process().name}/{builds}"
    eps = getattr(model_config.hf_config, "rms_norm_eps", None)
    state = install.installed
    return (
        f"[vision-exp] active pid={os.getpid()} role={role} vllm={vllm.__version__} "
        f"plan={state.plan[:8]} overlay={state.overlay[:8]} routing={routing} "
        f"visibility={visibility} eps={eps:g}"
        f"{' platform=rocm (not run on AMD hardware)' if current_platform.is_rocm() else ''}"
    )
