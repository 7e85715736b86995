"""The CPU's own kernel of experts selects inside, which is refused; tests never run it."""

from __future__ import annotations


def select_outside() -> None:
    """From now on this process's experts count as ones whose selection is vLLM's router's."""
    from vllm.model_executor.layers.fused_moe import (
        fused_moe_method_base,
        unquantized_fused_moe_method,
    )

    for method in (
        fused_moe_method_base.FusedMoEMethodBase,
        unquantized_fused_moe_method.UnquantizedFusedMoEMethod,
    ):
        method.is_monolithic = False
