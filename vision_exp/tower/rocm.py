"""Whether the fused blocks run on a ROCm GPU: tried once, when the tower first runs at start-up.

Not run on AMD hardware: Triton's AMD back end takes the kernels ahead of time
(bench/amd_kernels.py), and this is what protects a GPU where it does not, or where they compute
something else. The tower then runs module by module, which needs nothing but torch.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from vision_exp.tower import fused, graphs
from vision_exp.tower.backends import Backend

#: One image whose rows fill no block of any kernel.
GRID = (5, 7)

logger = logging.getLogger("vllm.vision_exp")


def fused_runs(tower: Any, like: torch.Tensor) -> bool:
    """True on any other platform; on ROCm what a first try of the fused blocks gave.

    `like`: patches (n, 3, p, p), of which only kind and device matter. One line in the log where
    they do not run.
    """
    if torch.version.hip is None:
        return True
    if not hasattr(tower, "_fused_runs"):
        why = _why_not(tower, like)
        if why:
            logger.warning(
                "[vision-exp] the tower runs module by module, slower: the fused kernels do not "
                "run on this GPU (%s)",
                why,
            )
        tower._fused_runs = not why
    return bool(tower._fused_runs)


def _why_not(tower: Any, like: torch.Tensor) -> str:
    count = GRID[0] * GRID[1]
    random = torch.Generator(like.device).manual_seed(0)
    patches = torch.rand((count, *like.shape[1:]), device=like.device, generator=random)
    patches = patches.mul_(2).sub_(1).to(like.dtype)
    try:
        found = graphs.launch(tower, patches, [GRID], [count], Backend()).float()
        # What only graphs run besides.
        axis = tower.rope.axis_tables(like.device)[0]
        width = torch.tensor([GRID[1]], dtype=torch.int32, device=like.device)
        expanded = fused.expand_rope_table(axis, width, count)
        expected = tower.forward_plain(patches, GRID).float()
        off = float((found - expected).norm() / expected.norm())
        rope = float((expanded - tower.rope([GRID], like.device)[0]).norm())
    except Exception as error:  # noqa: BLE001  compilers raise what they like; slower, not wrong
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    if not off <= graphs.REPLAY_ERROR or rope:
        return f"their rows are off by {off:.2g}, a table by {rope:.2g}"
    return ""
