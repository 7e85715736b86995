"""Which rows of a batch may look past their sliding window, and how far: arithmetic on the host.

The rule: inside one image's START..END every token sees every other. Elsewhere a token at position
p sees max(p - window + 1, 0)..p. So an image row's window moves its left edge back to START where
START is further away, and its right edge on to END; both edges count in positions of the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vision_exp.engine.step import ImageSpan


@dataclass(frozen=True)
class RowSpan:
    """One image of the batch.

    request: index among the batch's prefill requests. row: index of START among the rows of all
    its prefill requests; the image's rows follow each other. start, end: positions of START and
    END in the prompt, inclusive.
    """

    request: int
    row: int
    start: int
    end: int

    @property
    def count(self) -> int:
        return self.end - self.start + 1


def row_spans(
    spans: Mapping[str, Sequence[ImageSpan]],
    request_ids: Sequence[str],
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
) -> tuple[list[RowSpan], list[RowSpan]]:
    """Images of the prefill requests `request_ids` that this step computes: (whole, split).

    query_lens, seq_lens: of those requests; the last query_lens[i] of seq_lens[i] positions are
    this step's rows. `split` holds images of which only a part is among them, which the scheduler
    rules exclude; their rows must stay causal, as rows of earlier steps may no longer be cached.
    """
    whole: list[RowSpan] = []
    split: list[RowSpan] = []
    row = 0
    for index, (name, length, stop) in enumerate(
        zip(request_ids, query_lens, seq_lens, strict=True)
    ):
        first = stop - length
        for span in spans.get(name, ()):
            if span.end < first or span.start >= stop:
                continue
            found = RowSpan(index, row + span.start - first, span.start, span.end)
            inside = span.start >= first and span.end < stop
            (whole if inside else split).append(found)
        row += length
    return whole, split


def reach(whole: Sequence[RowSpan], rows: int) -> np.ndarray:
    """int32 (2, rows): how many positions each prefill row sees to its left and right in its image.

    Both are 0 outside images.
    """
    seen = np.zeros((2, rows), dtype=np.int32)
    for span in whole:
        ahead = np.arange(span.count, dtype=np.int32)
        seen[0, span.row : span.row + span.count] = ahead
        seen[1, span.row : span.row + span.count] = ahead[::-1]
    return seen


def keys(span: RowSpan, window: int) -> tuple[np.ndarray, np.ndarray]:
    """For each row of one image: first position that it sees, and how many from there on. int32."""
    position = np.arange(span.start, span.end + 1, dtype=np.int32)
    first = np.maximum(np.minimum(position - window + 1, span.start), 0)
    return first, span.end + 1 - first


def widest(window: int, image_tokens: int) -> int:
    """Most keys of one row. START sees window - 1 before it, itself and the rest of the image."""
    return window + image_tokens
