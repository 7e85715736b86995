"""vLLM's own worker and runner classes over real MoE layers, for the start-up self-test.

Stand-ins: the runner's forward, which runs the MoE layers on the step's own token ids, and
attention, which needs a GPU; child_visibility.py has that part on the real classes.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from checks import equal, raises
from rig_routing import HIDDEN, Rig
from torch import nn
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.worker.gpu_worker import Worker

from vision_exp import evidence
from vision_exp.model import hooks, selftest

hooks.patching.when_imported("vllm.v1.worker.gpu_worker", hooks._wrap_worker)


class Block(nn.Module):
    """Stands for a decoder layer."""

    def __init__(self, moe: Any) -> None:
        super().__init__()
        self.ffn, self.attn = moe, nn.Identity()


def model(rig: Rig, *, mega: bool = False) -> nn.Module:
    built = nn.Module()
    built.layers = nn.ModuleList(Block(rig.moe(layer, mega=mega)) for layer in (0, 3))
    return built


def runner(rig: Rig, module: Any, target: nn.Module, draft: nn.Module | None = None) -> Any:
    """A runner with the wrapped methods of vLLM's class, and a forward of this file."""
    methods = module.GPUModelRunner
    made = SimpleNamespace(
        vllm_config=rig.config,
        encoder_cache={},
        get_model=lambda: target,
        speculator=draft and SimpleNamespace(model=draft),
        kv_cache_config=cache(),
        steps=[],
        forwards=[target, *([draft] if draft else [])],
        ids=None,
    )

    def execute_model(self: Any, output: Any, intermediate: Any = None) -> None:
        self.steps.append(output)
        for new in output.scheduled_new_reqs:
            self.ids = torch.tensor(new.prompt_token_ids)
            forward(rig, self.forwards[0], self.ids)

    def sample_tokens(self: Any, grammar: Any) -> str:
        for one in self.forwards[1:]:
            forward(rig, one, self.ids)
        return "sampled"

    for name, body in (("execute_model", execute_model), ("sample_tokens", sample_tokens)):
        wrapper = getattr(methods, name).__dict__["__vision_exp_wrapper__"]
        setattr(made, name, partial(wrapper, body, made))
    return made


def forward(rig: Rig, module: nn.Module, ids: torch.Tensor) -> None:
    from vllm.forward_context import set_forward_context

    for block in module.layers:
        wanted = block.ffn.hash_indices_dtype or torch.int32
        with set_forward_context(None, rig.config), torch.inference_mode():
            block.ffn(torch.zeros(len(ids), HIDDEN, dtype=torch.bfloat16), ids.to(wanted))


def cache(blocks: int = 100) -> KVCacheConfig:
    shape = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
    groups = [
        KVCacheGroupSpec(["full"], FullAttentionSpec(block_size=256, **shape)),
        KVCacheGroupSpec(["swa"], SlidingWindowSpec(block_size=16, sliding_window=128, **shape)),
    ]
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def worker(made: Any) -> Worker:
    """vLLM's own worker with `made` as its runner; only its set-up is left out."""
    built = object.__new__(Worker)
    built.vllm_config, built.model_runner = made.vllm_config, made
    built.use_v2_model_runner, built.profiler, built._pp_send_work = False, None, []
    return built


def start(made: Any) -> list[str]:
    """`compile_or_warm_up_model` with a body that records what was logged before it."""
    wrapper = Worker.compile_or_warm_up_model.__dict__["__vision_exp_wrapper__"]
    evidence._logged.clear()
    with logged() as lines:
        reached: list[str] = []
        wrapper(lambda self: reached.extend(lines()), worker(made))
    return reached


@contextlib.contextmanager
def logged() -> Iterator[Callable[[], list[str]]]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("vllm.vision_exp")
    logger.addHandler(handler)
    try:
        yield lambda: stream.getvalue().splitlines()
    finally:
        logger.removeHandler(handler)


def runner_modules() -> list[Any]:
    from vllm.v1.worker import gpu_model_runner as v1
    from vllm.v1.worker.gpu import model_runner as v2

    return [v1, v2]


def refused(rig: Rig, target: nn.Module, named: str, made: Any = None) -> None:
    made = made or runner(rig, runner_modules()[0], target)
    with raises(selftest.SelfTestError, "the start is refused", named, "VISION_EXP_SELF_TEST=0"):
        start(made)
    # Switched off for diagnosis it starts, says so, and the first image is reported, once.
    with mock.patch.dict(os.environ, VISION_EXP_SELF_TEST="0"):
        first, second = start(made)
    equal("nothing was tested" in first and "active pid=" in second, True, first)
    if (
        "no image row" in named
        or "did not run" in named
        or "execute_model" in vars(made)
        and (not isinstance(made.execute_model, partial))
    ):
        return  # what only the start can see
    with logged() as lines:
        for _ in range(2):
            worker(made).execute_model(selftest.step_with_image(rig.config, cache()))
            worker(made).sample_tokens(None)
        told = lines()
    equal(len(told), 1, "\n".join(told))
    equal("image rows passed unseen through layers (" in told[0], True, told[0])
    equal(named.split(" (")[0] in told[0], True, told[0])
