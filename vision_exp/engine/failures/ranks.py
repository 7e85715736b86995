"""Whether a failed encoder call can be left behind on every rank, so that the step may go on.

A tower that ranks share ends each block in sums over the ranks. If all of them fail on the same
images, nobody is left waiting and the step goes on. If one fails alone, the others wait for it in a
sum that it has left, and nothing can be done about that after the fact. Then the error is raised
again, as without this overlay, and vLLM stops: at once if it is the rank that answers (the first),
else when the step has taken VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS (300). So it does for a device that
does not recover.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from vision_exp.config import is_vision_exp

# A rank that fails waits this long for the others to fail too.
BARRIER_TIMEOUT_S = 30.0
# Work that was queued before the error takes no longer, unless it waits for another rank.
DRAIN_TIMEOUT_S = 20.0


def isolated(vllm_config: Any) -> bool:
    """True if an image that fails costs its requests only; the same answer in every process.

    Not with pipeline or context parallelism, where another rank answers than the one that encodes,
    nor with a KV or encoder-cache connector, which may have copied rows of the failed image away.
    """
    parallel = vllm_config.parallel_config
    return (
        is_vision_exp(vllm_config.model_config.hf_config)
        and parallel.world_size == parallel.tensor_parallel_size
        and vllm_config.kv_transfer_config is None
        and vllm_config.ec_transfer_config is None
    )


def recover(error: Exception, images: Sequence[str]) -> None:
    """Return if every rank failed on `images` and can go on; else raise `error` again."""
    if not agree(images, device_lost()):
        raise error
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def agree(images: Sequence[str], lost: bool) -> bool:
    """True if every tensor-parallel rank calls this for the same images and none is lost.

    Ranks that have not failed do not call; they are waited for BARRIER_TIMEOUT_S.
    """
    from vllm.distributed.parallel_state import get_tp_group

    ranks = get_tp_group()
    if ranks.world_size == 1:
        return not lost
    try:
        torch.distributed.monitored_barrier(ranks.cpu_group, timedelta(seconds=BARRIER_TIMEOUT_S))
    except RuntimeError:
        return False
    found: list[Any] = [None] * ranks.world_size
    torch.distributed.all_gather_object(found, (tuple(images), lost), group=ranks.cpu_group)
    return all(one == (tuple(images), False) for one in found)


def device_lost() -> bool:
    """True if the device does not finish what was queued before the error."""
    if not torch.cuda.is_available():
        return False
    try:
        # Not synchronize(): a sum that another rank never joins would be waited for without end.
        done, limit = torch.cuda.Event(), time.monotonic() + DRAIN_TIMEOUT_S
        done.record()
        while not done.query():
            if time.monotonic() > limit:
                return True
            time.sleep(0.001)
    except RuntimeError:  # what an illegal access leaves behind
        return True
    return False
