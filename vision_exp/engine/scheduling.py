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
from dataclasses import replace
from typing import Any

from vision_exp.engine.spans import ImageSpan, spans_of

logger = logging.getLogger("vllm.vision_exp")


def atomic_spans(features: Iterable[Any], lookahead: int) -> tuple[ImageSpan, ...]:
    """What no chunk may split: every image block, leading pads included.

    A draft that reads `lookahead` tokens past the chunk's end needs the encoder output of an image
    that near, so blocks with fewer tokens between them are one span.
    """
    found: list[ImageSpan] = []
    for span in sorted(spans_of(features), key=lambda span: span.start):
        if found and span.start - found[-1].stop < lookahead:
            found[-1] = replace(found[-1], stop=span.stop)
        else:
            found.append(span)
    return tuple(found)


def clip_chunk(spans: Sequence[ImageSpan], computed: int, new: int) -> int:
    """Most tokens, at most `new`, for a chunk from position `computed` that splits no span.

    A chunk that itself starts inside a span cannot help splitting it and keeps `new`.
    """
    for span in spans:
        if span.is_split_at(computed + new) and span.start >= computed:
            return span.start - computed
    return new


def truncate_hit(spans: Sequence[ImageSpan], hit: int) -> int:
    """A prefix hit of `hit` tokens, shortened to before the span that it would end in."""
    return next((span.start for span in spans if span.is_split_at(hit)), hit)


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


def check_fits(mm_features: Iterable[Any], vllm_config: Any) -> None:
    """Raise VLLMValidationError (HTTP 400) if an image can never be prefilled in one piece."""
    ahead = lookahead(vllm_config.speculative_config)
    limit = largest_chunk(vllm_config)
    for index, span in enumerate(atomic_spans(mm_features, ahead)):
        # Up to lookahead - 1 tokens after the image may have to go with it.
        needed = span.stop - span.start + max(ahead - 1, 0)
        if needed > limit:
            from vllm.exceptions import VLLMValidationError

            raise VLLMValidationError(
                f"image {index} of the prompt takes {needed} tokens, which must be prefilled in "
                f"one step, but a step of this server takes {limit}: start it with "
                f"max_num_batched_tokens (and long_prefill_token_threshold, if set) of at least "
                f"{needed}, or send a smaller image"
            )


class AtomicImageScheduler:
    """The rules of one scheduler instance."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.lookahead = lookahead(scheduler.vllm_config.speculative_config)
        self.largest_chunk = largest_chunk(scheduler.vllm_config)
        self.looked_up: tuple[ImageSpan, ...] = ()

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

    def _spans(self, request: Any) -> tuple[ImageSpan, ...]:
        if not request.mm_features:
            return ()
        found = atomic_spans(request.mm_features, self.lookahead)
        fitting = tuple(span for span in found if span.stop - span.start <= self.largest_chunk)
        if len(fitting) < len(found):
            # Intake refuses these. One that came another way must not wait for ever, with all
            # requests behind it.
            logger.error(
                "[vision-exp] request %s has an image that no step can hold: its rows do not see "
                "all of it",
                request.request_id,
            )
        return fitting

    def _clip(self, request: Any, spans: Sequence[ImageSpan], computed: int, new: int) -> int:
        if new > 0 and any(span.is_split_at(computed) for span in spans):
            # Every way to get here is closed above; if one opens, the image loses visibility.
            logger.error(
                "[vision-exp] request %s is prefilled from position %d, inside an image: rows of "
                "that image do not see all of it",
                request.request_id,
                computed,
            )
        return clip_chunk(spans, computed, new)

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
        spans = self._spans(request)
        new = self._clip(request, spans, num_computed_tokens, num_new_tokens)
        while True:
            found = original(
                request, num_computed_tokens, new, encoder_compute_budget, *args, **kwargs
            )
            # vLLM may have ended the chunk earlier still, before an image that does not fit its
            # encoder budget: not inside another one either.
            new = clip_chunk(spans, num_computed_tokens, found[1])
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
        return clip_chunk(self._spans(request), num_computed_tokens, new)

    def _get_computed_blocks(self, original: Callable[..., Any], request: Any) -> Any:
        self.looked_up = self._spans(request)
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
        while (limit := truncate_hit(self.looked_up, found[1])) < found[1]:
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
        if truncate_hit(self._spans(request), hit) < hit:
            return 0, False
        return count, load_async
