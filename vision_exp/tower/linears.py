"""The linear layers of the vision modules; parallel.py makes vLLM's instead of torch's own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Linears:
    """Makes layers that map a tensor to a tensor and hold ``weight`` (and ``bias``): torch's own.

    ``tp_size`` ranks share the heads and the inner widths. ``qkv`` has the rows q, k, v, with a
    bias; ``gate_up`` the rows gate, up, without. ``prefix`` is the full name of the layer.
    """

    tp_size: int = 1

    def replicated(self, n_in: int, n_out: int, *, bias: bool, prefix: str) -> nn.Module:
        return nn.Linear(n_in, n_out, bias=bias)

    column = row = replicated

    def qkv(self, dim: int, head_dim: int, n_heads: int, *, prefix: str) -> nn.Module:
        return nn.Linear(dim, 3 * head_dim * n_heads)

    def gate_up(self, n_in: int, n_out: int, *, prefix: str) -> nn.Module:
        return nn.Linear(n_in, 2 * n_out, bias=False)


PLAIN = Linears()
