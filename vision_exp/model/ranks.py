"""Refuses to start when ranks of one server run different overlays or patches; asks all ranks.

Hosts or containers that are updated one by one could otherwise share a model between two versions
of this code, with no error and wrong answers.
"""

from __future__ import annotations

from typing import Any

from vision_exp import install


class RankMismatchError(RuntimeError):
    """Ranks of one model were started with different code."""


def check(vllm_config: Any) -> None:
    """Compare digests over all ranks, before anything is built or loaded.

    A collective: every rank calls it, once per model. RankMismatchError, on every rank, names all
    digests. Nothing is sent where there is one rank.
    """
    state = install.installed
    compare(gather_all(vllm_config, (state.overlay, state.plan)))


def gather_all(vllm_config: Any, value: Any) -> list[Any]:
    """Every rank's `value`: tensor, pipeline and data-parallel ranks, in the order of the world.

    Of its tensor-parallel group alone with elastic expert parallelism, where ranks come and go and
    the others are not there to answer.
    """
    from vllm.distributed import parallel_state

    elastic = getattr(vllm_config.parallel_config, "enable_elastic_ep", False)
    group = parallel_state.get_tp_group() if elastic else parallel_state.get_world_group()
    return gather(value, group.cpu_group, group.world_size)


def gather(value: Any, group: Any, ranks: int) -> list[Any]:
    """Every rank's `value`, in rank order, over a CPU process group."""
    if ranks == 1:
        return [value]
    import torch

    found: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(found, value, group=group)
    return found


def compare(found: list[tuple[str, str]]) -> None:
    """RankMismatchError unless all ranks have the same (overlay, plan) digests."""
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
