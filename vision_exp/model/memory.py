"""What the vision part takes of this rank's memory, for one line in the log."""

from __future__ import annotations

from collections.abc import Iterable

import torch

#: MiB on an H200 (bench/results/README.md): all graphs of a tower that is not shared, and what the
#: largest image takes on top while it is encoded.
GRAPHS, LARGEST_IMAGE = 140, 19


def line(
    parameters: Iterable[torch.Tensor], cache_tokens: int, hidden: int, *, graphs: bool
) -> str:
    """The line: bytes of `parameters`, and of `cache_tokens` cached BF16 rows of `hidden`."""
    held = sum(parameter.nbytes for parameter in parameters)
    cache = cache_tokens * hidden * 2
    captured = f"CUDA graphs about {GRAPHS} MiB" if graphs else "no CUDA graphs"
    return (
        f"[vision-exp] memory of the vision part on this rank: weights {_mib(held)}, {captured}, "
        f"largest image about {LARGEST_IMAGE} MiB, cached image rows up to {_mib(cache)}"
    )


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
