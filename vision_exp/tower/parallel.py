"""The vision modules' linear layers from vLLM, shared by tensor-parallel ranks or whole on each.

Shared: a rank holds its heads and its part of the inner widths, and two sums over the ranks close
each block. Whole on each rank: under ``--mm-encoder-tp-mode data``, where ranks take images instead
of heads, and where a width cannot be divided by the number of ranks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

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

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.distributed.parallel_state:get_tensor_model_parallel_world_size",
    "vllm.model_executor.layers.linear:"
    "ReplicatedLinear.__init__(input_size, output_size, bias, prefix, return_bias)",
    "vllm.model_executor.layers.linear:ColumnParallelLinear.__init__("
    "input_size, output_size, bias, prefix, return_bias, disable_tp)",
    "vllm.model_executor.layers.linear:RowParallelLinear.__init__("
    "input_size, output_size, bias, prefix, return_bias, disable_tp)",
    "vllm.model_executor.layers.linear:QKVParallelLinear.__init__("
    "hidden_size, head_size, total_num_heads, bias, prefix, return_bias, disable_tp)",
    "vllm.model_executor.layers.linear:MergedColumnParallelLinear.__init__("
    "input_size, output_sizes, bias, prefix, return_bias, disable_tp)",
)

logger = logging.getLogger("vllm.vision_exp")


@dataclass(frozen=True)
class VllmLinears:
    """See linears.py. ``tp_size`` is vLLM's tensor-parallel size, or 1 for whole layers."""

    tp_size: int

    @classmethod
    def for_config(cls, config: VisionConfig, *, whole: bool) -> VllmLinears:
        """``whole``: every rank gets all weights, as ``--mm-encoder-tp-mode data`` asks."""
        ranks = get_tensor_model_parallel_world_size()
        widths = (config.n_heads, config.inter_dim, config.hidden_size)
        if not whole and any(width % ranks for width in widths):
            logger.warning(
                "[vision-exp] %d tensor-parallel ranks cannot share a tower of %d heads, "
                "inner width %d and output width %d: each rank holds all of it",
                ranks,
                *widths,
            )
            whole = True
        return cls(tp_size=1 if whole else ranks)

    def replicated(self, n_in: int, n_out: int, *, bias: bool, prefix: str) -> nn.Module:
        return ReplicatedLinear(n_in, n_out, bias=bias, prefix=prefix, return_bias=False)

    def column(self, n_in: int, n_out: int, *, bias: bool, prefix: str) -> nn.Module:
        return ColumnParallelLinear(
            n_in, n_out, bias=bias, prefix=prefix, return_bias=False, disable_tp=self._whole
        )

    def row(self, n_in: int, n_out: int, *, bias: bool, prefix: str) -> nn.Module:
        return RowParallelLinear(
            n_in, n_out, bias=bias, prefix=prefix, return_bias=False, disable_tp=self._whole
        )

    def qkv(self, dim: int, head_dim: int, n_heads: int, *, prefix: str) -> nn.Module:
        return QKVParallelLinear(
            dim,
            head_dim,
            n_heads,
            bias=True,
            prefix=prefix,
            return_bias=False,
            disable_tp=self._whole,
        )

    def gate_up(self, n_in: int, n_out: int, *, prefix: str) -> nn.Module:
        return MergedColumnParallelLinear(
            n_in,
            [n_out, n_out],
            bias=False,
            prefix=prefix,
            return_bias=False,
            disable_tp=self._whole,
        )

    @property
    def _whole(self) -> bool:
        return self.tp_size == 1
