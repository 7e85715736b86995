"""A CPU stand-in for vLLM's AMD platform: the real modules of amd/, on what says that it is ROCm.

vLLM's own module about the platform asks the machine for a GPU when it is imported; in its place
stands one that answers as a machine without AMD's AITER kernels does.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

PACKAGE = "vllm.models.deepseek_v4.amd"


class _Platform(ModuleType):
    """`on_gfx950()` and the like: this is no GPU of any kind."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_ON_"):
            return False
        if name.startswith("on_"):
            return lambda: False
        raise AttributeError(name)


def modules() -> dict[str, Any]:
    """The release's own model, mtp and rocm of amd/, and dspark where it has one."""
    if "vllm.platforms.rocm" not in sys.modules:
        sys.modules["vllm.platforms.rocm"] = _Platform("vllm.platforms.rocm")
    found = ("rocm", "model", "mtp", "dspark")
    return {
        name: importlib.import_module(f"{PACKAGE}.{name}")
        for name in found
        if importlib.util.find_spec(f"{PACKAGE}.{name}")
    }


class _Rocm:
    """The CPU's platform object, saying that it is ROCm."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def __getattr__(self, name: str) -> Any:
        if name in ("is_rocm", "is_cpu", "is_cuda"):
            return lambda: name == "is_rocm"
        return getattr(self._stock, name)


@contextlib.contextmanager
def platform() -> Iterator[None]:
    """DeepSeek-V4's modules, and who asks vLLM anew, find themselves on ROCm.

    The rest of vLLM stays on the CPU, or it would look for kernels that no CPU has.
    """
    import vllm.platforms

    stand_in = _Rocm(vllm.platforms.current_platform)
    asking = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("vllm.models.deepseek_v4") and hasattr(module, "current_platform")
    ]
    with contextlib.ExitStack() as stack:
        for module in (vllm.platforms, *asking):
            stack.enter_context(mock.patch.object(module, "current_platform", stand_in))
        yield
