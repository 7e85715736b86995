"""What the ranks of a model tell each other before it is built.

A start with different overlays or patches is refused: hosts or containers that are updated one by
one could otherwise share a model between two versions of this code, with no error and wrong
answers. And all ranks take the same tower mode.
"""

from __future__ import annotations

from typing import Any, TypeVar

from vision_exp import install
from vision_exp.tower import mode

T = TypeVar("T")


class RankMismatchError(RuntimeError):
    """Ranks of one model were started with different code."""


def check(vllm_config: Any) -> None:
    """Compare digests over all ranks, before anything is built or loaded.

    A collective: every rank calls it, once per model. RankMismatchError, on every rank, names all
    digests. Nothing is sent where there is one rank.
    """
    state = install.installed
    compare(gather_all(vllm_config, (state.overlay, state.plan)))


def tower_mode(asked: str) -> mode.Mode:
    """How the ranks run the tower, in the log too; ``asked`` is ``--mm-encoder-tp-mode``.

    A collective. mode.TowerModeError, on every rank, where their settings differ.
    """
    from vllm.distributed import parallel_state

    group = parallel_state.get_tp_group()
    ranks = gather(mode.this_rank(), group.cpu_group, group.world_size)
    found = mode.decide(ranks, asked)
    mode.log(found, len(ranks))
    return found


def gather_all(vllm_config: Any, own: T) -> list[T]:
    """What every rank says: tensor, pipeline and data-parallel ranks, in the order of the world.

    Of its tensor-parallel group alone with elastic expert parallelism, where ranks come and go and
    the others are not there to answer.
    """
    from vllm.distributed import parallel_state

    elastic = getattr(vllm_config.parallel_config, "enable_elastic_ep", False)
    group = parallel_state.get_tp_group() if elastic else parallel_state.get_world_group()
    return gather(own, group.cpu_group, group.world_size)


def gather(own: T, group: Any, ranks: int) -> list[T]:
    """What each rank says, in rank order, over a CPU process group."""
    if ranks == 1:
        return [own]
    import torch

    found: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(found, own, group=group)
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
