"""An image block is prefilled in one piece, on every release and for both model runners.

vLLM's own rule (`disable_chunked_mm_input`) skips images that repeat or whose encoder output is
cached, and splits an image that starts exactly at a chunk's start. Here no chunk ends inside a
block, a prefix-cache hit that would end inside one is cut back to before it, and a prompt whose
image can never be scheduled whole is refused with the number of tokens it needs.

Only schedulers of Vision-Exp checkpoints are changed, through attributes of the instance: other
schedulers keep their classes' methods.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vision_exp import patching

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.v1.core.sched.scheduler:Scheduler.__init__",
    "vllm.v1.core.sched.scheduler:Scheduler._try_schedule_encoder_inputs("
    "request, num_computed_tokens, num_new_tokens, encoder_compute_budget)",
    "vllm.v1.core.sched.scheduler:Scheduler._reserve_prefill_lookahead(request, "
    "num_computed_tokens, num_new_tokens) since 0.28",
    "vllm.v1.core.sched.scheduler:Scheduler.connector",
    "vllm.v1.core.sched.scheduler:Scheduler.kv_cache_manager",
    "vllm.v1.core.sched.scheduler:Scheduler.vllm_config",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.coordinator",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks(request)",
    "vllm.v1.core.kv_cache_coordinator:"
    "KVCacheCoordinator.find_longest_cache_hit(block_hashes, max_cache_hit_length)",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:"
    "KVConnectorBase_V1.get_num_new_matched_tokens(request, num_computed_tokens)",
    "vllm.config.kv_transfer:KVTransferConfig.kv_load_failure_policy",
    "vllm.config.scheduler:SchedulerConfig.max_num_scheduled_tokens",
    "vllm.config.scheduler:SchedulerConfig.max_num_batched_tokens",
    "vllm.config.scheduler:SchedulerConfig.long_prefill_token_threshold",
    "vllm.config.speculative:SpeculativeConfig.max_num_new_slots_for_drafting",
    "vllm.config.speculative:SpeculativeConfig.num_speculative_tokens",
    "vllm.config.speculative:SpeculativeConfig.use_eagle",
    "vllm.config.speculative:SpeculativeConfig.use_multi_module_mtp since 0.27",
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
    "vllm.v1.engine.input_processor:InputProcessor.vllm_config",
    "vllm.v1.request:Request.mm_features",
    "vllm.v1.request:Request.num_tokens",
    "vllm.v1.request:Request.request_id",
    "vllm.multimodal.inputs:MultiModalFeatureSpec.mm_position",
    "vllm.multimodal.inputs:PlaceholderRange.offset",
    "vllm.multimodal.inputs:PlaceholderRange.length",
    "vllm.exceptions:VLLMValidationError",
)

logger = logging.getLogger("vllm.vision_exp")


@dataclass(frozen=True)
class Extent:
    """Prompt positions [start, stop) that must be computed in one chunk."""

    start: int
    stop: int

    def holds(self, boundary: int) -> bool:
        """True if a chunk that ends before position `boundary` would split the extent."""
        return self.start < boundary < self.stop


def extents(mm_features: Iterable[Any], lookahead: int) -> tuple[Extent, ...]:
    """What to keep whole: every image block, leading pads included.

    A draft that reads `lookahead` tokens past the chunk's end needs the encoder output of an image
    that near, so blocks with fewer tokens between them are one extent.
    """
    found: list[Extent] = []
    places = sorted((f.mm_position.offset, f.mm_position.length) for f in mm_features)
    for offset, length in places:
        if found and offset - found[-1].stop < lookahead:
            found[-1] = Extent(found[-1].start, offset + length)
        else:
            found.append(Extent(offset, offset + length))
    return tuple(found)


def whole(kept: Sequence[Extent], computed: int, new: int) -> int:
    """Most tokens, at most `new`, for a chunk from position `computed` that splits no extent.

    A chunk that itself starts inside an extent cannot help splitting it and keeps `new`.
    """
    for extent in kept:
        if extent.holds(computed + new) and extent.start >= computed:
            return extent.start - computed
    return new


def cut_back(kept: Sequence[Extent], hit: int) -> int:
    """A prefix hit of `hit` tokens, shortened to before the extent that it would end in."""
    return next((extent.start for extent in kept if extent.holds(hit)), hit)


def lookahead(speculative_config: Any) -> int:
    """Positions past a chunk's end that the draft reads in prefill: 0 without such a draft."""
    if speculative_config is None or not speculative_config.use_eagle():
        return 0
    several = getattr(speculative_config, "use_multi_module_mtp", None)  # from 0.27
    return speculative_config.num_speculative_tokens if several is not None and several() else 1


def largest_chunk(vllm_config: Any) -> int:
    """Most tokens of one request that a step can schedule."""
    config = vllm_config.scheduler_config
    limit = config.max_num_scheduled_tokens or config.max_num_batched_tokens
    if config.long_prefill_token_threshold > 0:
        limit = min(limit, config.long_prefill_token_threshold)
    speculative = vllm_config.speculative_config
    # From 0.28 every scheduled request also reserves its draft tokens' slots.
    slots = speculative.max_num_new_slots_for_drafting if speculative is not None else 0
    return min(limit, config.max_num_batched_tokens - slots)


def install() -> None:
    """Wrap scheduler construction and request intake, now or when vLLM imports them."""
    patching.when_imported("vllm.v1.core.sched.scheduler", _wrap_scheduler)
    patching.when_imported("vllm.v1.engine.input_processor", _wrap_intake)


def _is_vision(vllm_config: Any) -> bool:
    from vision_exp.install import is_vision_exp

    model_config = getattr(vllm_config, "model_config", None)
    return model_config is not None and is_vision_exp(model_config.hf_config)


def _wrap_intake(module: Any) -> None:
    patching.wrap(module.InputProcessor, "process_inputs", _process_inputs)


def _process_inputs(original: Callable[..., Any], processor: Any, *args: Any, **kwargs: Any) -> Any:
    request = original(processor, *args, **kwargs)
    if request.mm_features and _is_vision(processor.vllm_config):
        check_fits(request.mm_features, processor.vllm_config)
    return request


def check_fits(mm_features: Iterable[Any], vllm_config: Any) -> None:
    """Raise VLLMValidationError (HTTP 400) if an image can never be prefilled in one piece."""
    ahead = lookahead(vllm_config.speculative_config)
    limit = largest_chunk(vllm_config)
    for index, extent in enumerate(extents(mm_features, ahead)):
        # Up to lookahead - 1 tokens after the image may have to go with it.
        needed = extent.stop - extent.start + max(ahead - 1, 0)
        if needed > limit:
            from vllm.exceptions import VLLMValidationError

            raise VLLMValidationError(
                f"image {index} of the prompt takes {needed} tokens, which must be prefilled in "
                f"one step, but a step of this server takes {limit}: start it with "
                f"max_num_batched_tokens (and long_prefill_token_threshold, if set) of at least "
                f"{needed}, or send a smaller image"
            )


def _wrap_scheduler(module: Any) -> None:
    patching.wrap(module.Scheduler, "__init__", _scheduler_init)


def _scheduler_init(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    original(scheduler, *args, **kwargs)
    if _is_vision(scheduler.vllm_config):
        WholeImages(scheduler).install()


class WholeImages:
    """The rules of one scheduler instance."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.lookahead = lookahead(scheduler.vllm_config.speculative_config)
        self.largest_chunk = largest_chunk(scheduler.vllm_config)
        self.looked_up: tuple[Extent, ...] = ()

    def install(self) -> None:
        """Raises ValueError for a KV connector whose hits cannot be kept out of images."""
        scheduler = self.scheduler
        self._replace(scheduler, "_try_schedule_encoder_inputs", self._try_schedule)
        if hasattr(scheduler, "_reserve_prefill_lookahead"):  # from 0.28
            self._replace(scheduler, "_reserve_prefill_lookahead", self._reserve)
        manager = scheduler.kv_cache_manager
        self._replace(manager, "get_computed_blocks", self._get_computed_blocks)
        self._replace(manager.coordinator, "find_longest_cache_hit", self._find_hit)
        connector = scheduler.connector
        if connector is None:
            return
        transfer = scheduler.vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy == "recompute":
            raise ValueError(
                "kv_load_failure_policy=recompute resumes a prompt at any block boundary, also "
                "inside an image, which Vision-Exp cannot prefill in two pieces: use 'fail'"
            )
        self._replace(connector, "get_num_new_matched_tokens", self._matched)

    @staticmethod
    def _replace(owner: Any, name: str, rule: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            return rule(original, *args, **kwargs)

        setattr(owner, name, method)

    def _extents(self, request: Any) -> tuple[Extent, ...]:
        if not request.mm_features:
            return ()
        found = extents(request.mm_features, self.lookahead)
        kept = tuple(e for e in found if e.stop - e.start <= self.largest_chunk)
        if len(kept) < len(found):
            # Intake refuses these. One that came another way must not wait for ever, with all
            # requests behind it.
            logger.error(
                "[vision-exp] request %s has an image that no step can hold: its rows do not see "
                "all of it",
                request.request_id,
            )
        return kept

    def _whole(self, request: Any, kept: Sequence[Extent], computed: int, new: int) -> int:
        if new > 0 and any(extent.holds(computed) for extent in kept):
            # Every way to get here is closed above; if one opens, the image loses visibility.
            logger.error(
                "[vision-exp] request %s is prefilled from position %d, inside an image: rows of "
                "that image do not see all of it",
                request.request_id,
                computed,
            )
        return whole(kept, computed, new)

    def _try_schedule(
        self,
        original: Callable[..., Any],
        request: Any,
        num_computed_tokens: int,
        num_new_tokens: int,
        encoder_compute_budget: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        kept = self._extents(request)
        new = self._whole(request, kept, num_computed_tokens, num_new_tokens)
        while True:
            found = original(
                request, num_computed_tokens, new, encoder_compute_budget, *args, **kwargs
            )
            # vLLM may have ended the chunk earlier still, before an image that does not fit its
            # encoder budget: not inside another one either.
            new = whole(kept, num_computed_tokens, found[1])
            if new == found[1]:
                return found

    def _reserve(
        self,
        original: Callable[..., Any],
        request: Any,
        num_computed_tokens: int,
        num_new_tokens: int,
    ) -> int:
        new = original(request, num_computed_tokens, num_new_tokens)
        return whole(self._extents(request), num_computed_tokens, new)

    def _get_computed_blocks(self, original: Callable[..., Any], request: Any) -> Any:
        self.looked_up = self._extents(request)
        try:
            return original(request)
        finally:
            self.looked_up = ()

    def _find_hit(
        self, original: Callable[..., Any], block_hashes: Any, max_cache_hit_length: int
    ) -> Any:
        # Looked up again with a lower limit instead of truncated: a sliding-window group must
        # still hold the rows of the window before the new end.
        found = original(block_hashes, max_cache_hit_length)
        while (limit := cut_back(self.looked_up, found[1])) < found[1]:
            found = original(block_hashes, limit)
        return found

    def _matched(
        self, original: Callable[..., Any], request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        count, load_async = original(request, num_computed_tokens)
        if not count:
            return count, load_async
        # Of a prompt that is there to its last token, vLLM computes that token again.
        hit = min(num_computed_tokens + count, request.num_tokens - 1)
        if cut_back(self._extents(request), hit) < hit:
            return 0, False
        return count, load_async
