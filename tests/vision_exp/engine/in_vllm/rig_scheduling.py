"""What the scheduling checks share: a release's real scheduler, and requests with image blocks.

Overlay rules are installed by `engine.scheduling` exactly as on a server; only the model config is
a stand-in.
"""

from __future__ import annotations

import dataclasses
import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.config import CacheConfig, SchedulerConfig, VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

VISION = SimpleNamespace(model_type="deepseek_v4", vision_n_layers=2)
TEXT = SimpleNamespace(model_type="deepseek_v4")
WINDOW = 128
RETENTION = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"
BY_CONFIG = "prefix_cache_retention_interval"  # of the cache's config from 0.29 on


def build(
    hf_config: Any,
    *,
    tokens: int,
    caching: bool = False,
    seqs: int = 8,
    retention: int | None = None,
    draft: bool = False,
    **scheduler: Any,
) -> Any:
    """A scheduler over the model's two kinds of groups: blocks of 256, and of 64 with a window.

    retention: interval of prefix-cache retention, None for dense. draft: a third group, of blocks
    of 64 with a window, whose hits look one block further, as an MTP draft's do.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    config = VllmConfig()
    config.scheduler_config = SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=4096,
        enable_chunked_prefill=True,
        disable_chunked_mm_input=True,
        is_encoder_decoder=False,
        async_scheduling=False,
        **scheduler,
    )
    config.cache_config = CacheConfig(block_size=256, enable_prefix_caching=caching)
    config.cache_config.num_gpu_blocks = 4000
    config.model_config = model_config(hf_config)
    shape = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
    groups = [
        KVCacheGroupSpec(["full"], FullAttentionSpec(block_size=256, **shape)),
        KVCacheGroupSpec(["swa"], SlidingWindowSpec(block_size=64, sliding_window=WINDOW, **shape)),
    ]
    if draft:
        spec = SlidingWindowSpec(block_size=64, sliding_window=WINDOW, **shape)
        groups.append(KVCacheGroupSpec(["draft"], spec, is_eagle_group=True))
    named = {field.name for field in dataclasses.fields(KVCacheConfig)}
    wanted = {BY_CONFIG: retention} if BY_CONFIG in named else {}
    cache = KVCacheConfig(num_blocks=4000, kv_cache_tensors=[], kv_cache_groups=groups, **wanted)
    block_size, hash_block_size = resolve_kv_cache_block_sizes(cache, config)
    grammars = mock.Mock(spec=StructuredOutputManager)
    grammars.should_advance.return_value = False
    registry = mock.Mock()
    registry.supports_multimodal_inputs.return_value = False
    variable = {} if retention is None else {RETENTION: str(retention)}
    with mock.patch.dict(os.environ, variable):
        built = Scheduler(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=grammars,
            block_size=block_size,
            hash_block_size=hash_block_size,
            mm_registry=registry,
            log_stats=True,
        )
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    built.max_num_encoder_input_tokens = 4096
    built.encoder_cache_manager = EncoderCacheManager(cache_size=4096)
    init_none_hash(sha256)
    built.hasher = get_request_block_hasher(hash_block_size, sha256)
    return built


class ModelConfig(SimpleNamespace):
    """What a scheduler reads from a model config; any other feature is off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def model_config(hf_config: Any) -> Any:
    # runner_type: keeps the choice of model runner out of it; nothing here depends on that.
    return ModelConfig(
        hf_config=hf_config, max_model_len=4096, is_multimodal_model=True, runner_type="pooling"
    )


def request(
    scheduler: Any,
    name: str,
    length: int,
    images: list[tuple[int, int, str]],
    seed: int = 0,
    tokens: list[int] | None = None,
) -> Request:
    """A prompt of `length` tokens, `tokens` if given, with images (offset, length, hash)."""
    features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=key,
            mm_position=PlaceholderRange(offset=offset, length=size),
            mm_hash=key,
        )
        for offset, size, key in images
    ]
    return Request(
        request_id=name,
        prompt_token_ids=tokens or [(seed + i) % 1000 for i in range(length)],
        sampling_params=SamplingParams(max_tokens=4, ignore_eos=True),
        pooling_params=None,
        mm_features=features or None,
        block_hasher=scheduler.hasher,
    )


def chunks(scheduler: Any, limit: int = 200) -> dict[str, list[tuple[int, int]]]:
    """Run to the end of every prefill: request -> chunks [start, stop) of prompt tokens."""
    seen: dict[str, list[tuple[int, int]]] = {}
    for _ in range(limit):
        if all(r.num_output_tokens > 0 for r in scheduler.requests.values()):
            return seen
        step(scheduler, seen)
    return {**seen, "hang": []}


def step(scheduler: Any, seen: dict[str, list[tuple[int, int]]]) -> None:
    output = scheduler.schedule()
    sampled: list[list[int]] = []
    names = list(output.num_scheduled_tokens)
    for name in names:
        count = output.num_scheduled_tokens[name]
        waiting = scheduler.requests[name]
        start = waiting.num_computed_tokens - count
        if start < waiting.num_prompt_tokens:
            seen.setdefault(name, []).append((start, start + count))
        sampled.append([7] if start + count >= waiting.num_tokens else [])
    result = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=sampled,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
    scheduler.update_from_output(output, result)


def split(prefill: list[tuple[int, int]], images: list[tuple[int, int, str]]) -> list[str]:
    """Names of images that no single chunk holds."""
    return [
        key
        for offset, size, key in images
        if not any(a <= offset and offset + size <= b for a, b in prefill)
    ]


def prefill(
    hf_config: Any, length: int, images: list[tuple[int, int, str]], **build_args: Any
) -> Any:
    scheduler = build(hf_config, **build_args)
    scheduler.add_request(request(scheduler, "r", length, images))
    seen = chunks(scheduler)
    ends = [b for _, b in seen["r"]]
    return {
        "split": split(seen["r"], images),
        "hang": "hang" in seen,
        "covered": ends[-1] == length and [a for a, _ in seen["r"]] == [0, *ends[:-1]],
        "chunks": seen["r"],
    }


def retoken(scheduler: Any, old: Request, cut: int, images: list[tuple[int, int, str]]) -> Request:
    changed = request(scheduler, old.request_id, old.num_prompt_tokens, images)
    tokens = list(old.prompt_token_ids)
    tokens[cut:] = [t + 1000 for t in tokens[cut:]]
    return Request(
        request_id=old.request_id,
        prompt_token_ids=tokens,
        sampling_params=old.sampling_params,
        pooling_params=None,
        mm_features=changed.mm_features,
        block_hasher=scheduler.hasher,
    )


def status() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


def finish_step(scheduler: Any, output: Any) -> None:
    names = list(output.num_scheduled_tokens)
    result = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=[[] for _ in names],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
    scheduler.update_from_output(output, result)
