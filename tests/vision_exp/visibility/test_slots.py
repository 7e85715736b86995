"""Rows for FlashInfer's SM120 kernel, against float64 attention over a real cache layout."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vision_exp.engine.spans import ImageSpan
from vision_exp.visibility import sm120, spans

WINDOW, IMAGE, DIM = 128, 384, 16


def attended(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """(heads, dim) of one row, keys (n, dim) being values too."""
    return torch.softmax(query @ keys.T / DIM**0.5, -1) @ keys


def layout(
    requests: int, length: int, page: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each request's keys; a cache (pages, page, dim) that holds them shuffled; its table."""
    pages = -(-length // page)
    keys = torch.randn(requests, pages * page, DIM, dtype=torch.float64)
    table = (torch.randperm(requests * pages) + 1).view(requests, pages)
    cache = torch.full((requests * pages + 1, page, DIM), float("nan"), dtype=torch.float64)
    cache[table.flatten()] = keys.view(-1, page, DIM)
    return keys, cache, table.to(torch.int32)


@pytest.mark.parametrize("page", [16, 64, 256])
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_rows_attend_to_the_whole_image_and_its_window(page: int, heads: int) -> None:
    torch.manual_seed(page + heads)
    # Every offset of a page of 64 by fours, short spans and spans of many calls, two decode rows.
    images = [
        [ImageSpan(start, start + length), ImageSpan(start + 500, start + 500 + other)]
        for start, length, other in ((3, 2, 381), (67, 65, 64), (127 + 4 * (heads // 8), 381, 130))
    ]
    decodes = 2
    keys, cache, table = layout(decodes + len(images), 1100, page)
    found, row = [], 0
    for request, pair in enumerate(images):
        for image in pair:
            found.append(spans.RowSpan(request, row, image))
            row += image.stop - image.first
    none = torch.zeros(0)
    seen = spans.ImageVisibility(none, none, none, tuple(found), WINDOW, IMAGE)
    metadata = SimpleNamespace(block_table=table, block_size=page, num_decodes=decodes)
    slots, lens = sm120.slots(seen, metadata)
    assert slots.shape == (row, 1, WINDOW + IMAGE)
    flat = cache.view(-1, DIM)
    query = torch.randn(row, heads, DIM, dtype=torch.float64)
    parts = list(sm120.slices(row, sm120.SM120_ROWS))
    assert max(part.stop - part.start for part in parts) <= sm120.SM120_ROWS
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(row))
    for span in found:
        # Every ninth row and both ends: a row that read an unwritten page would be not a number.
        for at in sorted({*range(0, span.count, 9), span.count - 1}):
            position, index = span.image.first + at, span.row + at
            first = max(min(position - WINDOW + 1, span.image.first), 0)
            used = slots[index, 0, : int(lens[index])].long()
            assert bool((slots[index, 0, int(lens[index]) :] == -1).all())
            mine = attended(query[index], flat[used])
            want = attended(query[index], keys[decodes + span.request, first : span.image.stop])
            torch.testing.assert_close(mine, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("page", [16, 64, 256])
def test_an_image_at_every_offset_of_a_page_names_its_keys_alone(page: int) -> None:
    """One request for each offset, between two decode rows and an image of another length."""
    torch.manual_seed(page)
    decodes, lengths = 2, (2, 63, 65, 129, 381)
    images = [ImageSpan(page + at, page + at + lengths[at % len(lengths)]) for at in range(page)]
    keys, cache, table = layout(decodes + page, 2 * page + 400, page)
    starts = [0]
    for image in images:
        starts.append(starts[-1] + image.stop - image.first)
    found = [spans.RowSpan(at, starts[at], image) for at, image in enumerate(images)]
    none = torch.zeros(0)
    seen = spans.ImageVisibility(none, none, none, tuple(found), WINDOW, IMAGE)
    metadata = SimpleNamespace(block_table=table, block_size=page, num_decodes=decodes)
    slots, lens = sm120.slots(seen, metadata, len(cache))
    flat = cache.view(-1, DIM)
    for span in found:
        rows = torch.arange(span.row, span.row + span.count)
        position = span.image.first + torch.arange(span.count)
        first = (position - WINDOW + 1).clamp(min=0).minimum(torch.tensor(span.image.first))
        assert torch.equal(lens[rows], (span.image.stop - first).to(lens.dtype))
        column = torch.arange(slots.shape[-1])
        used = column < lens[rows, None]
        assert bool((slots[rows, 0][~used] == -1).all())
        wanted = keys[decodes + span.request][(first[:, None] + column)[used]]
        assert torch.equal(flat[slots[rows, 0][used].long()], wanted)
