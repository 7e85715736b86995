"""What the tensor-parallel ranks of a model tell each other before it is built.

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


def check() -> None:
    """Compare digests over the tensor-parallel group, before anything is built or loaded.

    A collective: every rank calls it, once per model. RankMismatchError, on every rank, names all
    digests. Nothing is sent where there is one rank.
    """
    state = install.installed
    compare(_of_all((state.overlay, state.plan)))


def tower_mode(asked: str) -> mode.Mode:
    """How the ranks run the tower, in the log too; ``asked`` is ``--mm-encoder-tp-mode``.

    A collective. mode.TowerModeError, on every rank, where their settings differ.
    """
    ranks = _of_all(mode.this_rank())
    found = mode.decide(ranks, asked)
    mode.log(found, len(ranks))
    return found


def _of_all(own: T) -> list[T]:
    """What each tensor-parallel rank says, in rank order."""
    from vllm.distributed import parallel_state

    group = parallel_state.get_tp_group()
    return gather(own, group.cpu_group, group.world_size) if group.world_size > 1 else [own]


def gather(own: T, group: Any, ranks: int) -> list[T]:
    """What each rank says, in rank order, over a CPU process group."""
    import torch

    found: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(found, own, group=group)
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
