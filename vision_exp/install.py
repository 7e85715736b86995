"""What the injected hooks call: `install(site, namespace, plan=, overlay=)`.

Standard library only at module level, in config, patching and settings too: the hooks run for every
model that imports vLLM's DeepSeek-V4 package. Everything that costs time or can fail waits for
`activate`, which the first Vision-Exp config of a process triggers.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vision_exp import patching, settings
from vision_exp.config import ARCHITECTURE, NATIVE_ARCHITECTURE, VisionConfigError, is_vision_exp

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.transformers_utils.configs.deepseek_v4:DeepseekV4Config.__init__",
    "vllm.transformers_utils.model_arch_config_convertor:"
    "ModelArchConfigConvertorBase.is_mm_prefix_lm",
)

FORCED_EPS = 1e-6
# A fork's switch for a kernel of the package b12x, and where that says which values it takes.
_B12X = "VLLM_USE_B12X_MHC"
_B12X_TAKES = re.compile(r"^MHC_SUPPORTED_RMS_EPS\s*=\s*\(([\d.e+\-, ]*)\)", re.MULTILINE)

# Order of installation. Each has an idempotent install() that wraps through vision_exp.patching.
FEATURES = (
    "model.hooks",
    "chat.hooks",
    "engine.hooks",
    "visibility.hooks",
    "routing.hooks",
)

# Each has install_model(namespace) and install_draft(site, namespace).
MODEL_FEATURES = ("model.hooks", "routing.hooks")

SITES = ("config", "model", "dspark", "mtp")

logger = logging.getLogger("vllm.vision_exp")


@dataclass(frozen=True)
class Installed:
    """What the hook of this process was written with: digests of the plan and the overlay."""

    plan: str
    overlay: str


installed = Installed(plan="unknown", overlay="unknown")
_activated = False
_model_sites: dict[str, dict[str, Any]] = {}
_lock = threading.RLock()


def _new_lock_after_fork() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock_after_fork)


def install(site: str, namespace: dict[str, Any], *, plan: str, overlay: str) -> None:
    """Install the wrappers of one hook site ("config", "model", "dspark" or "mtp").

    `namespace` is the patched module's globals(). Until the process has seen a Vision-Exp config,
    model sites are only remembered: other models import these modules too. Does nothing under
    VISION_EXP_DISABLE. Raises ValueError for an unknown site.
    """
    global installed
    if site not in SITES:
        raise ValueError(f"unknown hook site {site!r}")
    if settings.DISABLE.is_on():
        return
    installed = Installed(plan=plan, overlay=overlay)
    if site == "config":
        _install_config(namespace["DeepseekV4Config"])
        return
    with _lock:
        _model_sites[site] = namespace
        if _activated:
            _install_model_site(site, namespace)


def activate() -> None:
    """Install every feature, once per process. Called for each Vision-Exp config."""
    global _activated
    if _activated:
        return
    with _lock:
        if _activated:
            return
        for module in FEATURES:
            _call(module, "install")
        for site, namespace in _model_sites.items():
            _install_model_site(site, namespace)
        _activated = True


def _install_model_site(site: str, namespace: dict[str, Any]) -> None:
    for module in MODEL_FEATURES:
        if site == "model":
            _call(module, "install_model", namespace)
        else:
            _call(module, "install_draft", site, namespace)


def _call(module: str, function: str, *args: Any) -> None:
    getattr(importlib.import_module(f"vision_exp.{module}"), function)(*args)


def _install_config(config_class: type) -> None:
    patching.wrap(config_class, "__init__", _config_init)
    patching.add_method(config_class, "__setstate__", _config_setstate)


def _config_init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    if is_vision_exp(self):
        prepare_config(self)
        activate()


def _config_setstate(self: Any, state: dict[str, Any]) -> None:
    # The default of pickle and copy; the attributes were prepared in the sending process.
    self.__dict__.update(state)
    if is_vision_exp(self):
        activate()


def prepare_config(config: Any) -> None:
    """Set what vLLM reads from the config of a multimodal model, before anything reads it."""
    from vision_exp.layout import PLACEHOLDER_ID  # needs torch, which hooks must not import

    config.is_mm_prefix_lm = True
    config.mm_prefix_clamp_sliding_window = True
    if getattr(config, "architectures", None) == [NATIVE_ARCHITECTURE]:
        config.architectures = [ARCHITECTURE]
    if not hasattr(config, "image_token_index"):
        config.image_token_index = PLACEHOLDER_ID
    eps = getattr(config, "rms_norm_eps", None)
    if eps is None or eps == FORCED_EPS:
        return
    if settings.keeps_eps():
        _check_kept_eps(eps)
        return
    config.rms_norm_eps = FORCED_EPS
    _log_eps(os.getpid(), eps)


def _check_kept_eps(eps: float) -> None:
    if os.environ.get(_B12X, "0") in ("", "0"):
        return
    takes = _b12x_eps()
    if eps in takes:
        return
    raise VisionConfigError(
        f"[vision-exp] {settings.RMS_NORM_EPS}=keep leaves rms_norm_eps={eps:g}, and {_B12X}=1 "
        f"selects a kernel that takes {', '.join(f'{each:g}' for each in takes)} only: the start "
        f"is refused, nothing was changed. Unset {settings.RMS_NORM_EPS}, which makes it "
        f"{FORCED_EPS:g}; or unset {_B12X}, which keeps the checkpoint's value with vLLM's own "
        "kernel"
    )


def _b12x_eps() -> tuple[float, ...]:
    """What the installed b12x's source says; it is read, as importing it would import torch."""
    found = importlib.util.find_spec("b12x")
    for folder in (found and found.submodule_search_locations) or ():
        try:
            source = Path(folder, "norm", "mhc", "_impl.py").read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
        said = _B12X_TAKES.search(source)
        if said is not None:
            return tuple(float(each) for each in said[1].split(",") if each.strip())
    return (FORCED_EPS,)  # earlier releases say nothing, and take this alone


@functools.cache
def _log_eps(process: int, eps: float) -> None:
    # Once per process: vLLM reads the same config several times.
    message = "[vision-exp] rms_norm_eps %g -> %g (%s=keep leaves the checkpoint's value)"
    logger.info(message, eps, FORCED_EPS, settings.RMS_NORM_EPS)
