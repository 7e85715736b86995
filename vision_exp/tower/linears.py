"""What the vision modules ask of linear layers, and the plain torch answer.

`parallel` answers with vLLM's layers, sharded or replicated over tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import nn


class Linears(Protocol):
    """Makes linear layers that map a tensor to a tensor and hold ``weight`` (and ``bias``).

    ``tp_size`` ranks share the heads and the inner widths. ``qkv`` has the rows q, k, v, with a
    bias; ``gate_up`` the rows gate, up, without. ``prefix`` is the full name of the layer.
    """

    @property
    def tp_size(self) -> int: ...

    def replicated(self, n_in: int, n_out: int, *, bias: bool, prefix: str) -> nn.Module: ...

    def column(self, n_in: int, n_out: int, *, bias: bool, prefix: str) -> nn.Module: ...

    def row(self, n_in: int, n_out: int, *, bias: bool, prefix: str) -> nn.Module: ...

    def qkv(self, dim: int, head_dim: int, n_heads: int, *, prefix: str) -> nn.Module: ...

    def gate_up(self, n_in: int, n_out: int, *, prefix: str) -> nn.Module: ...


@dataclass(frozen=True)
class PlainLinears:
    """torch's own layers on one device."""

    tp_size: int = 1

    def replicated(self, n_in: int, n_out: int, *, bias: bool, prefix: str) -> nn.Module:
        return nn.Linear(n_in, n_out, bias=bias)

    column = row = replicated

    def qkv(self, dim: int, head_dim: int, n_heads: int, *, prefix: str) -> nn.Module:
        return nn.Linear(dim, 3 * head_dim * n_heads)

    def gate_up(self, n_in: int, n_out: int, *, prefix: str) -> nn.Module:
        return nn.Linear(n_in, 2 * n_out, bias=False)


PLAIN = PlainLinears()
