"""The vision modules' linear layers from vLLM, sharded over tensor-parallel ranks or replicated.

Sharded: a rank holds its heads and its part of the inner widths, and two sums over the ranks close
each block. Replicated: under ``--mm-encoder-tp-mode data``, where ranks take images instead of
heads, and where a width cannot be divided by the number of ranks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from torch import nn
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)

from vision_exp.config import VisionConfig
from vision_exp.tower.linears import Linears

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.distributed.parallel_state:get_tensor_model_parallel_world_size",
    "vllm.model_executor.layers.linear:ColumnParallelLinear.__init__(input_size, output_size, "
    "bias, prefix, return_bias, disable_tp)",
    "vllm.model_executor.layers.linear:MergedColumnParallelLinear.__init__(input_size, "
    "output_sizes, bias, prefix, return_bias, disable_tp)",
    "vllm.model_executor.layers.linear:QKVParallelLinear.__init__(hidden_size, head_size, "
    "total_num_heads, bias, prefix, return_bias, disable_tp)",
    "vllm.model_executor.layers.linear:ReplicatedLinear.__init__(input_size, output_size, bias, "
    "prefix, return_bias)",
    "vllm.model_executor.layers.linear:RowParallelLinear.__init__(input_size, output_size, bias, "
    "prefix, return_bias, disable_tp)",
)

logger = logging.getLogger("vllm.vision_exp")


@dataclass(frozen=True)
class VllmLinears(Linears):
    """vLLM's layers; ``tp_size`` is its tensor-parallel size, or 1 for replicated layers."""

    @classmethod
    def for_config(cls, config: VisionConfig, *, data_parallel: bool) -> VllmLinears:
        """``data_parallel``: every rank gets all weights, as ``--mm-encoder-tp-mode data`` asks."""
        ranks = get_tensor_model_parallel_world_size()
        widths = (config.n_heads, config.inter_dim, config.hidden_size)
        if data_parallel:
            return cls(tp_size=1)
        if any(width % ranks for width in widths):
            logger.warning(
                "[vision-exp] %d tensor-parallel ranks cannot share a tower of %d heads, "
                "inner width %d and output width %d: each rank holds all of it",
                ranks,
                *widths,
            )
            return cls(tp_size=1)
        return cls(tp_size=ranks)

    def replicated(self, n_in: int, n_out: int, *, bias: bool, prefix: str) -> nn.Module:
        return ReplicatedLinear(n_in, n_out, bias=bias, prefix=prefix, return_bias=False)

    def column(self, n_in: int, n_out: int, *, bias: bool, prefix: str) -> nn.Module:
        return ColumnParallelLinear(n_in, n_out, bias=bias, prefix=prefix, **self._options)

    def row(self, n_in: int, n_out: int, *, bias: bool, prefix: str) -> nn.Module:
        return RowParallelLinear(n_in, n_out, bias=bias, prefix=prefix, **self._options)

    def qkv(self, dim: int, head_dim: int, n_heads: int, *, prefix: str) -> nn.Module:
        return QKVParallelLinear(dim, head_dim, n_heads, bias=True, prefix=prefix, **self._options)

    def gate_up(self, n_in: int, n_out: int, *, prefix: str) -> nn.Module:
        return MergedColumnParallelLinear(
            n_in, [n_out, n_out], bias=False, prefix=prefix, **self._options
        )

    @property
    def _options(self) -> dict[str, Any]:
        return {"return_bias": False, "disable_tp": self.tp_size == 1}
