"""The output of every stage of a vision tower, for comparisons layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def recorded(tower: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Outputs by module name, in the order in which the stages run."""
    names = ["patch_embed", *(f"blocks.{i}" for i in range(len(tower.blocks))), "norm"]
    found: dict[str, torch.Tensor] = {}
    hooks = [
        tower.get_submodule(name).register_forward_hook(
            lambda _module, _inputs, output, name=name: found.__setitem__(name, output)
        )
        for name in names
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
