"""Tower rows into embeddings: values, refusals, and no synchronisation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vision_exp.layout import SENTINEL_FIRST, TokenType
from vision_exp.model.encoder import merge_rows
from vision_exp.model.model import VisionExpMixin

HIDDEN = 3
LEARNED = {"start": 1.0, "pad": 2.0, "newline": 4.0, "end": 5.0}


def fake_model(device: str = "cpu") -> SimpleNamespace:
    return SimpleNamespace(
        **{
            f"image_{name}": torch.full((HIDDEN,), value, device=device)
            for name, value in LEARNED.items()
        }
    )


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.data())
def test_the_kth_marked_row_is_the_kth_row(marks: list[bool], data: st.DataObject) -> None:
    count = sum(marks)
    cut = data.draw(st.integers(0, count))
    rows = torch.arange(count * HIDDEN, dtype=torch.float32).view(count, HIDDEN) + 100
    embeds = torch.randn(len(marks), HIDDEN)
    found = merge_rows(embeds, [rows[:cut], rows[cut:]], torch.tensor(marks))
    taken = iter(rows)
    expected = [next(taken) if mark else row for mark, row in zip(marks, embeds, strict=True)]
    assert torch.equal(found, torch.stack(expected))


def test_rows_take_the_dtype_of_the_embeddings() -> None:
    embeds = torch.zeros(2, HIDDEN, dtype=torch.bfloat16)
    found = merge_rows(embeds, torch.ones(1, HIDDEN), torch.tensor([False, True]))
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [[0] * HIDDEN, [1] * HIDDEN]


def test_a_batched_tensor_of_rows() -> None:
    embeds = torch.zeros(4, HIDDEN)
    found = merge_rows(embeds, torch.ones(2, 2, HIDDEN), torch.ones(4, dtype=torch.bool))
    assert torch.equal(found, torch.ones(4, HIDDEN))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_rows_is_refused(count: int) -> None:
    mask = torch.tensor([True, False, True])
    with pytest.raises(ValueError, match=f"{count} image embeddings for 2 positions"):
        merge_rows(torch.zeros(3, HIDDEN), torch.ones(count, HIDDEN), mask)
    with pytest.raises(ValueError, match="mask"):
        merge_rows(torch.zeros(3, HIDDEN), torch.ones(1, HIDDEN), None)


def test_learned_vectors_by_id() -> None:
    ids = torch.tensor([SENTINEL_FIRST - 1, *(SENTINEL_FIRST + kind for kind in TokenType), 129264])
    embeds = torch.full((len(ids), HIDDEN), 9.0)
    found = VisionExpMixin._put_learned(fake_model(), embeds, ids)[:, 0].tolist()
    assert found[0] == found[-1] == 9.0
    assert found[1 + TokenType.START] == LEARNED["start"]
    assert found[1 + TokenType.PAD] == LEARNED["pad"]
    assert found[1 + TokenType.NEWLINE] == LEARNED["newline"]
    assert found[1 + TokenType.END] == LEARNED["end"]


def test_nothing_waits_for_the_device() -> None:
    """Meta tensors have no values: reading one, or a shape that depends on one, raises."""
    ids = torch.empty(7, dtype=torch.int64, device="meta")
    embeds = torch.empty(7, HIDDEN, device="meta")
    mask = torch.empty(7, dtype=torch.bool, device="meta")
    with_vectors = VisionExpMixin._put_learned(fake_model("meta"), embeds, ids)
    merged = merge_rows(with_vectors, [torch.empty(2, HIDDEN, device="meta")], mask)
    assert merged.shape == (7, HIDDEN)
    with pytest.raises(RuntimeError):
        embeds[mask]  # what a boolean index would do
