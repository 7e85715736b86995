"""Runs in one vLLM release: its real scheduler, KV cache manager and requests, with image blocks.

Prints one JSON object: check name -> what was seen. Overlay rules are installed by
`vision_exp.scheduling` exactly as on a server; only the model config is a stand-in.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
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

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # before tests/vision_exp

from vision_exp import scheduling

VISION = SimpleNamespace(model_type="deepseek_v4", vision_n_layers=2)
TEXT = SimpleNamespace(model_type="deepseek_v4")
WINDOW = 128


def build(
    hf_config: Any, *, tokens: int, caching: bool = False, seqs: int = 8, **scheduler: Any
) -> Any:
    """A scheduler over the model's two kinds of groups: blocks of 256, and of 64 with a window."""
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
    cache = KVCacheConfig(num_blocks=4000, kv_cache_tensors=[], kv_cache_groups=groups)
    block_size, hash_block_size = resolve_kv_cache_block_sizes(cache, config)
    grammars = mock.Mock(spec=StructuredOutputManager)
    grammars.should_advance.return_value = False
    registry = mock.Mock()
    registry.supports_multimodal_inputs.return_value = False
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
    scheduler: Any, name: str, length: int, images: list[tuple[int, int, str]], seed: int = 0
) -> Request:
    """A prompt of `length` tokens with images (offset, length, hash)."""
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
        prompt_token_ids=[(seed + i) % 1000 for i in range(length)],
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


def every_offset() -> dict[str, Any]:
    """One image at every offset of a chunk, then the same image again (cached, then repeated)."""
    bad: list[Any] = []
    for offset in [*range(8), *range(120, 136), *range(250, 262), *range(440, 520, 7)]:
        images = [(offset, 208, "a"), (offset + 208 + 1, 207, "a"), (offset + 600, 207, "a")]
        seen = prefill(VISION, offset + 900, images, tokens=512)
        if seen["split"] or seen["hang"] or not seen["covered"]:
            bad.append((offset, seen))
    return {"bad": bad}


def cached_image() -> dict[str, Any]:
    """Another request encoded the image already; vLLM's own roll-back then skips it."""
    out = {}
    for kind, hf_config in (("overlay", VISION), ("stock", TEXT)):
        scheduler = build(hf_config, tokens=512)
        scheduler.add_request(request(scheduler, "first", 300, [(10, 208, "a")]))
        chunks(scheduler)
        images = [(400, 208, "a")]
        scheduler.add_request(request(scheduler, "second", 900, images, seed=5))
        out[kind] = split(chunks(scheduler)["second"], images)
    return out


def at_chunk_start() -> dict[str, Any]:
    """Decodes leave less budget than the image takes: it waits, and is not split."""
    out = {}
    for kind, hf_config in (("overlay", VISION), ("stock", TEXT)):
        scheduler = build(hf_config, tokens=256, seqs=64)
        for i in range(60):
            scheduler.add_request(request(scheduler, f"d{i}", 4, [], seed=i))
        images = [(0, 208, "a")]
        scheduler.add_request(request(scheduler, "image", 300, images, seed=500))
        seen = chunks(scheduler)
        out[kind] = {"split": split(seen["image"], images), "hang": "hang" in seen}
    return out


def prefix_hits() -> dict[str, Any]:
    """The first prompt leaves blocks that end inside, before and after the second one's image."""
    bad, hits = [], set()
    for offset in (3, 60, 100, 200, 255, 256, 300, 400, 511, 512, 600):
        images = [(offset, 380, "a"), (offset + 381, 207, "b")]
        scheduler = build(VISION, tokens=4096, caching=True)
        scheduler.add_request(request(scheduler, "first", 1400, images))
        chunks(scheduler)
        scheduler.finish_requests("first", status())
        for cut in (offset + 100, offset + 379, offset + 450, 1399, 1400):
            # Same tokens and images; the prompt differs from position `cut` on.
            again = request(scheduler, f"again{cut}", 1400, images)
            again = retoken(scheduler, again, cut, images)
            scheduler.add_request(again)
            seen = chunks(scheduler)[again.request_id]
            hits.add(seen[0][0])
            inside = [key for o, n, key in images if o < seen[0][0] < o + n]
            whole = split(seen, [i for i in images if i[0] >= seen[0][0]])
            if inside or whole:
                bad.append((offset, cut, seen))
            scheduler.finish_requests(again.request_id, status())
    return {"bad": bad, "hits": sorted(hits)}


def stock_hit() -> list[int]:
    """Where a stock scheduler resumes, and where the overlay does: the hit ends in the image."""
    resumed = []
    for hf_config in (TEXT, VISION):
        images = [(300, 380, "a")]
        scheduler = build(hf_config, tokens=4096, caching=True)
        scheduler.add_request(request(scheduler, "first", 1400, images))
        chunks(scheduler)
        scheduler.finish_requests("first", status())
        again = retoken(scheduler, request(scheduler, "again", 1400, images), 600, images)
        scheduler.add_request(again)
        resumed.append(chunks(scheduler)["again"][0][0])
    return resumed


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


def connector_hits() -> dict[str, Any]:
    """External tokens that would end inside an image are declined; others are taken."""
    scheduler = build(VISION, tokens=4096)
    images = [(300, 380, "a")]
    out = {}
    for external in (256, 512, 1024, 1400):
        connector = mock.Mock()
        connector.get_num_new_matched_tokens = lambda request, local, n=external: (n, False)
        scheduler.connector = connector
        scheduler.vllm_config.kv_transfer_config = SimpleNamespace(kv_load_failure_policy="fail")
        scheduling.WholeImages(scheduler).install()
        prompt = request(scheduler, "r", 1400, images)
        out[str(external)] = connector.get_num_new_matched_tokens(prompt, 0)[0]
    ends = request(scheduler, "e", 680, images)
    connector.get_num_new_matched_tokens = lambda request, local: (680, True)
    scheduling.WholeImages(scheduler).install()
    out["whole prompt that ends in the image"] = connector.get_num_new_matched_tokens(ends, 0)
    scheduler.vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
    try:
        scheduling.WholeImages(scheduler).install()
        out["recompute"] = "accepted"
    except ValueError as error:
        out["recompute"] = str(error)
    return out


def window_rows() -> dict[str, Any]:
    """While the chunk with the image runs, the window's cache holds START - 127 .. END."""
    scheduler = build(VISION, tokens=640)
    offset, size = 700, 380
    scheduler.add_request(request(scheduler, "r", 1300, [(offset, size, "a")]))
    for _ in range(20):
        output = scheduler.schedule()
        count = output.num_scheduled_tokens["r"]
        running = scheduler.requests["r"]
        stop = running.num_computed_tokens
        if stop - count <= offset and offset + size <= stop:
            group = scheduler.kv_cache_manager.coordinator.single_type_managers[1]
            blocks = group.req_to_blocks["r"]
            null = scheduler.kv_cache_manager.block_pool.null_block
            rows = range(offset - WINDOW + 1, offset + size)
            return {"missing": [row for row in rows if blocks[row // 64] is null]}
        finish_step(scheduler, output)
    return {"missing": "never ran"}


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


def never_fits() -> dict[str, Any]:
    """An image beyond every budget that passed by the intake: served, and not waited for."""
    images = [(10, 380, "a")]
    seen = prefill(VISION, 500, images, tokens=256)
    return {"hang": seen["hang"], "covered": seen["covered"]}


def text_untouched() -> dict[str, Any]:
    scheduler = build(TEXT, tokens=512, caching=True)
    owners = (scheduler, scheduler.kv_cache_manager, scheduler.kv_cache_manager.coordinator)
    names = ("_try_schedule_encoder_inputs", "get_computed_blocks", "find_longest_cache_hit")
    return {"replaced": [n for n in names for o in owners if n in vars(o)]}


def refusal() -> dict[str, Any]:
    """Intake: vLLM's own InputProcessor.process_inputs with the rest of it left out."""
    from vllm.v1.engine import input_processor

    scheduler = build(VISION, tokens=512)
    config = scheduler.vllm_config
    prompt = request(scheduler, "r", 900, [(400, 383, "a")])
    out = {"wrapped": hasattr(input_processor.InputProcessor.process_inputs, "__wrapped__")}
    processor = SimpleNamespace(vllm_config=config)
    for tokens in (383, 382):
        config.scheduler_config.max_num_batched_tokens = tokens
        try:
            scheduling._process_inputs(lambda _: prompt, processor)
            out[str(tokens)] = "accepted"
        except Exception as error:  # noqa: BLE001 - the type is what is checked
            out[str(tokens)] = f"{type(error).__name__}: {error}"
    config.scheduler_config.max_num_batched_tokens = 512
    config.scheduler_config.long_prefill_token_threshold = 300
    try:
        scheduling._process_inputs(lambda _: prompt, processor)
        out["threshold"] = "accepted"
    except Exception as error:  # noqa: BLE001
        out["threshold"] = type(error).__name__
    config.model_config.hf_config = TEXT
    out["text model"] = scheduling._process_inputs(lambda _: prompt, processor) is prompt
    return out


def with_draft() -> dict[str, Any]:
    """MTP reads past the chunk's end: several images, every gap, tight and wide budgets."""
    bad, ran, refused = [], 0, 0
    for ahead in (1, 3, 6):
        for gap in (1, 2, 3, 7):
            images = [(9, 207, "a"), (216 + gap, 206, "b"), (422 + 2 * gap, 208, "c")]
            length = 422 + 2 * gap + 208 + 2
            scheduler = build(VISION, tokens=700)
            scheduler.use_eagle = True
            if hasattr(scheduler, "num_prefill_lookahead"):
                scheduler.num_prefill_lookahead = ahead
            spec = SimpleNamespace(
                use_eagle=lambda: True,
                use_multi_module_mtp=lambda: True,
                num_speculative_tokens=ahead,
                max_num_new_slots_for_drafting=0,
            )
            scheduler.vllm_config.speculative_config = spec
            for name in ("_try_schedule_encoder_inputs", "_reserve_prefill_lookahead"):
                scheduler.__dict__.pop(name, None)
            scheduling.WholeImages(scheduler).install()
            scheduler.vllm_config.speculative_config = None
            for budget in (650, 636, 450, 430, 221, 215):
                scheduler.max_num_scheduled_tokens = budget
                name = f"r{budget}"
                prompt = request(scheduler, name, length, images)
                config = SimpleNamespace(
                    speculative_config=spec,
                    scheduler_config=SimpleNamespace(
                        max_num_scheduled_tokens=budget,
                        max_num_batched_tokens=700,
                        long_prefill_token_threshold=0,
                    ),
                )
                try:
                    scheduling.check_fits(prompt.mm_features, config)
                except Exception:  # noqa: BLE001 - refused, so it never reaches the scheduler
                    refused += 1
                    continue
                ran += 1
                scheduler.add_request(prompt)
                seen = chunks(scheduler)
                if "hang" in seen or split(seen[name], images):
                    bad.append((ahead, gap, budget, seen))
                scheduler.finish_requests(name, status())
    return {"bad": bad, "ran": ran, "refused": refused}


def main() -> None:
    scheduling.install()
    scheduling.install()
    checks = [
        every_offset,
        cached_image,
        at_chunk_start,
        prefix_hits,
        stock_hit,
        connector_hits,
        window_rows,
        never_fits,
        text_untouched,
        refusal,
        with_draft,
    ]
    chosen = sys.argv[1:]
    print(json.dumps({c.__name__: c() for c in checks if not chosen or c.__name__ in chosen}))


if __name__ == "__main__":
    main()
