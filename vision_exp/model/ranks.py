"""Refuses to start when tensor-parallel ranks run different overlays or patches.

Hosts or containers that are updated one by one could otherwise share a model between two versions
of this code, with no error and wrong answers.
"""

from __future__ import annotations

from typing import Any

from vision_exp import install


class RankMismatchError(RuntimeError):
    """Ranks of one model were started with different code."""


def check() -> None:
    """Compare digests over the tensor-parallel group, before anything is built or loaded.

    A collective: every rank calls it, once per model. RankMismatchError, on every rank, names all
    digests. Nothing is sent where there is one rank.
    """
    from vllm.distributed import parallel_state

    group = parallel_state.get_tp_group()
    if group.world_size > 1:
        state = install.installed
        compare(gather(state.overlay, state.plan, group.cpu_group, group.world_size))


def gather(overlay: str, plan: str, group: Any, ranks: int) -> list[tuple[str, str]]:
    """Every rank's (overlay, plan) digests, in rank order, over a CPU process group."""
    import torch

    found: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(found, (overlay, plan), group=group)
    return found


def compare(found: list[tuple[str, str]]) -> None:
    """RankMismatchError unless all ranks have the same digests."""
    if len(set(found)) <= 1:
        return
    lines = [
        f"rank {rank}: overlay {overlay}, plan {plan}" for rank, (overlay, plan) in enumerate(found)
    ]
    raise RankMismatchError(
        "vision-exp: the ranks of this model run different code:\n  "
        + "\n  ".join(lines)
        + "\nApply the same hotfix.py on every host, then start again."
    )
