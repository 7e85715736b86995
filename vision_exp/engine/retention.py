"""Sparse prefix-cache retention keeps the boundary before an image too.

With a retention interval (from 0.29 on the default is 0) vLLM keeps the sliding window's blocks in
the prefix cache only where it expects the next hit: before a prompt's last aligned boundary, and
where prompts were seen to part. A hit may not end inside an image (scheduling.py), so where such a
boundary lies in one, the hit that is left ends at the last aligned boundary before the image. Its
blocks are kept as well: a window of them for each group, evicted like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vision_exp.engine.scheduling import atomic_spans, truncate_hit
from vision_exp.engine.spans import ImageSpan


def boundary_before(spans: Sequence[ImageSpan], limit: int, alignment: int, margin: int = 0) -> int:
    """The longest prefix of at most `limit` tokens that a hit can have: aligned, in no image.

    margin: tokens past the prefix that a hit looks at (a draft's group matches one block more).
    """
    found = limit
    while True:
        aligned = max(found - margin, 0) // alignment * alignment
        found = truncate_hit(spans, aligned)
        if found == aligned:
            return aligned


class ImageRetention:
    """The rule for the cache managers of one scheduler, through attributes of these instances."""

    def __init__(self, lookahead: int) -> None:
        self.lookahead = lookahead  # as of scheduling.AtomicImageScheduler
        self.request: Any = None  # whose blocks are being cached
        self.margin = 0

    def install(self, coordinator: Any) -> None:
        """Nothing where every boundary is kept anyway, as before 0.25 and without an interval."""
        if getattr(coordinator, "retention_interval", None) is None:
            return
        managers = coordinator.single_type_managers
        self.margin = max((m.block_size for m in managers if m.use_eagle), default=0)
        for manager in managers:
            manager.cache_blocks = self._remember(manager.cache_blocks)
            manager.reachable_block_mask = self._keep(manager.reachable_block_mask)

    def _remember(self, original: Callable[..., None]) -> Callable[..., None]:
        def cache_blocks(request: Any, *args: Any, **kwargs: Any) -> None:
            self.request = request
            try:
                original(request, *args, **kwargs)
            finally:
                self.request = None

        return cache_blocks

    def _keep(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def reachable_block_mask(**kwargs: Any) -> list[bool] | None:
            mask = original(**kwargs)
            for boundary in self._boundaries(kwargs["alignment_tokens"]) if mask else ():
                more = original(**{**kwargs, **_last(kwargs, boundary)})
                mask = [one or other for one, other in zip(mask, more, strict=True)]
            return mask

        return reachable_block_mask

    def _boundaries(self, alignment: int) -> set[int]:
        request = self.request
        if request is None or not request.mm_features:
            return set()
        spans = atomic_spans(request.mm_features, self.lookahead)
        length = request.num_prompt_tokens
        # An exact repeat computes its last token again; the next turn need not.
        limits = (length - 1, length, getattr(request, "shared_prefix_boundary", 0))
        margins = (0, self.margin)
        found = {boundary_before(spans, limit, alignment, m) for limit in limits for m in margins}
        # Once an answer has passed it, the next turn need not go back to before the image.
        last = (length - 1) // alignment * alignment
        found.update(-(-s.stop // alignment) * alignment for s in spans if s.is_split_at(last))
        return found - {0}


def _last(kwargs: dict[str, Any], boundary: int) -> dict[str, Any]:
    """Arguments that name `boundary` as the only one to keep."""
    if "reachable_boundaries" in kwargs:  # from 0.26
        return {"retention_interval": 0, "reachable_boundaries": [boundary]}
    return {"retention_interval": 0, "num_prompt_tokens": boundary + 1}
