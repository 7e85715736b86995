"""A step with image rows runs without CUDA graphs.

Captured graphs hold vLLM's own router and a replay cannot choose another one. A step with image
rows therefore asks both graph dispatchers (V1 `CudagraphDispatcher`, V2 `CudaGraphManager`; target,
drafts and breakable graphs all go through them) for mode NONE, the mode of a batch larger than
every captured size. Data-parallel ranks run with the smallest mode that any of them asked for, in
every release, so the other ranks leave graphs in the same step.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from vision_exp.engine import context


def dispatch_v1(module: ModuleType) -> Callable[..., Any]:
    """The wrapper of `CudagraphDispatcher.dispatch` in vLLM's `module`."""
    none = module.CUDAGraphMode.NONE

    def dispatch(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        if context.current().has_image_rows:
            kwargs["valid_modes"] = {none}
            # Only FULL is ever excluded, which NONE already leaves out.
            kwargs["invalid_modes"] = None
        return original(self, *args, **kwargs)

    return dispatch


def dispatch_v2(module: ModuleType) -> Callable[..., Any]:
    """The wrapper of `CudaGraphManager.dispatch` in vLLM's `module`."""
    none = module.CUDAGraphMode.NONE

    def dispatch(
        original: Callable[..., Any],
        self: Any,
        num_reqs: int,
        num_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        found = original(self, num_reqs, num_tokens, *args, **kwargs)
        if not context.current().has_image_rows or found.cg_mode == none:
            return found
        loras = getattr(found, "num_active_loras", None)  # from 0.24
        return module.BatchExecutionDescriptor(
            cg_mode=none,
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            **({} if loras is None else {"num_active_loras": loras}),
        )

    return dispatch
