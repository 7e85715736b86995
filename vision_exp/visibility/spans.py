"""Which rows of a batch may look past their sliding window, and how far: arithmetic on the host.

The rule: inside one image's START..END every token sees every other. Elsewhere a token at position
p sees max(p - window + 1, 0)..p. So an image row's window moves its left edge back to START where
START is further away, and its right edge on to END; both edges count in positions of the request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vision_exp.engine.spans import ImageSpan

logger = logging.getLogger("vllm.vision_exp")

_ATTRIBUTE = "vision_exp_visible"


@dataclass(frozen=True)
class RowSpan:
    """One image of the batch.

    request: index among the batch's prefill requests. row: index of START among the rows of all
    its prefill requests; the rows of START..END follow each other. image: its place in the prompt.
    """

    request: int
    row: int
    image: ImageSpan

    @property
    def count(self) -> int:
        """Rows from START to END."""
        return self.image.stop - self.image.first


@dataclass(frozen=True)
class ImageVisibility:
    """The images of one batch's prefill rows; `window` and `image_tokens` bound a row's keys.

    lookback, lookahead: int32 (prefill rows,), positions that a row sees before and after itself in
    its image, 0 outside images. A row at position p sees
    max(min(p - window + 1, p - lookback), 0)..p + lookahead.
    spans: the same on the host, in row order. rows: int64 (image rows,), the indices of image rows
    among the prefill rows, span by span. cache: what the attention classes derive once per step.
    """

    lookback: torch.Tensor
    lookahead: torch.Tensor
    rows: torch.Tensor
    spans: tuple[RowSpan, ...]
    window: int
    image_tokens: int
    cache: dict[Any, Any] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Most keys of one row."""
        return widest(self.window, self.image_tokens)

    def any_in(self, start: int, stop: int) -> bool:
        """True if an image row is among prefill rows [start, stop)."""
        return any(span.row < stop and span.row + span.count > start for span in self.spans)


def attach(metadata: Any, visibility: ImageVisibility) -> None:
    """Put `visibility` on sliding-window metadata, for `get`."""
    setattr(metadata, _ATTRIBUTE, visibility)


def get(metadata: Any) -> ImageVisibility | None:
    """What `attach` put on sliding-window metadata; None: all rows are causal."""
    return getattr(metadata, _ATTRIBUTE, None)


def image_visibility(
    metadata: Any,
    images: Mapping[str, Sequence[ImageSpan]],
    request_ids: Sequence[str],
    window: int,
    image_tokens: int,
) -> ImageVisibility | None:
    """The images among the prefill rows of `metadata`; None if there are none.

    images: by request. request_ids: of the batch, in its order. Reads host tensors only. They are
    exact for prefill requests, also with asynchronous scheduling. ValueError for an image of more
    than `image_tokens` tokens.
    """
    count = metadata.num_prefills
    lens = metadata.prefill_query_lens_cpu[:count].tolist()
    stops = metadata.prefill_seq_lens_cpu[:count].tolist()
    names = request_ids[metadata.num_decodes : metadata.num_decodes + count]
    # A padded batch ends in requests without rows and without names.
    names = [*names, *[""] * (count - len(names))]
    complete, partial = row_spans(images, names, lens, stops)
    for span in partial:
        logger.error(
            "[vision-exp] rows of image %d..%d of request %s stay causal: only a part of it is "
            "prefilled in this step",
            span.image.first,
            span.image.stop - 1,
            names[span.request],
        )
    if not complete:
        return None
    longest = max(span.count for span in complete)
    if longest > image_tokens:
        raise ValueError(f"an image of {longest} tokens exceeds vision_max_n_token={image_tokens}")
    device = metadata.seq_lens.device
    distances = upload(look_distances(complete, metadata.num_prefill_tokens), device)
    rows = np.concatenate([np.arange(s.row, s.row + s.count, dtype=np.int64) for s in complete])
    return ImageVisibility(
        distances[0], distances[1], upload(rows, device), tuple(complete), window, image_tokens
    )


def row_spans(
    images: Mapping[str, Sequence[ImageSpan]],
    request_ids: Sequence[str],
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
) -> tuple[list[RowSpan], list[RowSpan]]:
    """Images of the prefill requests `request_ids` that this step computes: (complete, partial).

    query_lens, seq_lens: of those requests; the last query_lens[i] of seq_lens[i] positions are
    this step's rows. `partial` holds images of which only a part is among them, which the scheduler
    rules exclude; their rows must stay causal, as rows of earlier steps may no longer be cached.
    """
    complete: list[RowSpan] = []
    partial: list[RowSpan] = []
    row = 0
    for index, (name, length, stop) in enumerate(
        zip(request_ids, query_lens, seq_lens, strict=True)
    ):
        start = stop - length
        for image in images.get(name, ()):
            if image.stop <= start or image.first >= stop:
                continue
            found = RowSpan(index, row + image.first - start, image)
            inside = image.first >= start and image.stop <= stop
            (complete if inside else partial).append(found)
        row += length
    return complete, partial


def look_distances(spans: Sequence[RowSpan], rows: int) -> np.ndarray:
    """int32 (2, rows): each prefill row's lookback and lookahead in its image, 0 outside images."""
    seen = np.zeros((2, rows), dtype=np.int32)
    for span in spans:
        ahead = np.arange(span.count, dtype=np.int32)
        seen[0, span.row : span.row + span.count] = ahead
        seen[1, span.row : span.row + span.count] = ahead[::-1]
    return seen


def keys(image: ImageSpan, window: int) -> tuple[np.ndarray, np.ndarray]:
    """For each row of one image: first position that it sees, and how many from there on. int32."""
    position = np.arange(image.first, image.stop, dtype=np.int32)
    first = np.maximum(np.minimum(position - window + 1, image.first), 0)
    return first, image.stop - first


def widest(window: int, image_tokens: int) -> int:
    """Most keys of one row. START sees window - 1 before it, itself and the rest of the image."""
    return window + image_tokens


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """`values` on `device`, without waiting for the device."""
    host = torch.from_numpy(values)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
