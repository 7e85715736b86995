"""Intervals of prompt positions: where images lie, and what a step computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from vision_exp import layout


@dataclass(frozen=True)
class ImageSpan:
    """Prompt positions [start, stop) of one image's block.

    The first `leading_pads` of them lie before its START token: they are image rows for routing,
    but see nothing of the image.
    """

    start: int
    stop: int
    leading_pads: int = 0

    @property
    def first(self) -> int:
        """Position of START."""
        return self.start + self.leading_pads

    def overlaps(self, start: int, stop: int) -> bool:
        """True if a position of the block lies in [start, stop)."""
        return self.start < stop and self.stop > start

    def is_split_at(self, boundary: int) -> bool:
        """True if a chunk that ends before position `boundary` holds only a part of the block."""
        return self.start < boundary < self.stop


def span_of(feature: Any) -> ImageSpan:
    """The block of one `MultiModalFeatureSpec`."""
    start, length = feature.mm_position.offset, feature.mm_position.length
    return ImageSpan(start, start + length, layout.leading_pads(start))


def spans_of(features: Iterable[Any] | None) -> tuple[ImageSpan, ...]:
    """The blocks of a request's images, in the order given."""
    return tuple(span_of(feature) for feature in features or ())


def scheduled_ranges(scheduler_output: Any) -> Iterator[tuple[str, int, int]]:
    """(request id, start, stop) of every scheduled request: what the step computes."""
    cached = scheduler_output.scheduled_cached_reqs
    starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    starts.update((r.req_id, r.num_computed_tokens) for r in scheduler_output.scheduled_new_reqs)
    for request_id, count in scheduler_output.num_scheduled_tokens.items():
        yield request_id, starts[request_id], starts[request_id] + count
