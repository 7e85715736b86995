"""What image rows see: the arithmetic, and each release's builder and attention in a child.

The child runs vLLM's and the overlay's Triton kernels in Triton's interpreter and replaces the CUDA
kernels that attend by plain attention over the keys that the index rows name.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_rig
from hypothesis import given
from hypothesis import strategies as st

from vision_exp import settings
from vision_exp.engine.spans import ImageSpan
from vision_exp.visibility import flashinfer, sm120, support
from vision_exp.visibility import spans as row_math
from vision_exp.visibility.spans import RowSpan

CHILD = Path(__file__).parent / "in_vllm" / "child_visibility.py"
WINDOW = 128

#: Names of the child's checks to run alone; tests of the others fail then. For bench/mutants.py.
ONLY = os.environ.get("VISION_EXP_TEST_CHECKS", "").split()


def seen_by(position: int, images: list[ImageSpan]) -> range:
    """The rule in plain Python."""
    first, last = max(position - WINDOW + 1, 0), position
    for image in images:
        if image.first <= position < image.stop:
            first, last = min(first, image.first), image.stop - 1
    return range(first, last + 1)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, int, list[ImageSpan]]:
    """(length, positions computed before, images), no image cut by the computed part."""
    images, position = [], 0
    for _ in range(draw(st.integers(0, 4))):
        start = position + draw(st.integers(0, 300))
        pads = draw(st.integers(0, 3))
        images.append(ImageSpan(start, start + pads + draw(st.integers(2, 381)), pads))
        position = images[-1].stop
    length = position + draw(st.integers(1, 50))
    computed = draw(st.integers(0, length - 1))
    for image in images:
        if image.is_split_at(computed):
            computed = image.start
    return length, computed, images


@given(st.lists(prompts(), min_size=1, max_size=4))
def test_every_row_sees_what_the_rule_says(batch: list[tuple[int, int, list[ImageSpan]]]) -> None:
    names = [f"r{i}" for i in range(len(batch))]
    spans = {name: tuple(images) for name, (_, _, images) in zip(names, batch, strict=True)}
    lens = [length - computed for length, computed, _ in batch]
    complete, partial = row_math.row_spans(spans, names, lens, [n for n, _, _ in batch])
    assert partial == []
    lookback, lookahead = row_math.look_distances(complete, sum(lens))
    image_rows = {}
    for span in complete:
        for offset, (first, count) in enumerate(
            zip(*row_math.keys(span.image, WINDOW), strict=True)
        ):
            image_rows[span.row + offset] = range(first, first + count)
    row = 0
    for length, computed, images in batch:
        for position in range(computed, length):
            keys = seen_by(position, images)
            first = max(min(position - WINDOW + 1, position - lookback[row]), 0)
            assert range(first, position + lookahead[row] + 1) == keys
            assert image_rows.get(row, keys) == keys
            inside = any(image.first <= position < image.stop for image in images)
            assert inside == (row in image_rows)
            assert len(keys) <= row_math.widest(WINDOW, 381)
            row += 1
    assert row == sum(lens)


def test_an_image_of_which_a_part_runs_is_not_widened() -> None:
    first, second = ImageSpan(9, 61, 1), ImageSpan(80, 100)
    spans = {"a": (first, second)}
    complete, partial = row_math.row_spans(spans, ["a"], [50], [90])  # positions 40..89
    assert complete == []
    assert [span.image for span in partial] == [first, second]
    assert row_math.row_spans(spans, ["a"], [19], [80]) == ([], [])
    _, partial = row_math.row_spans(spans, ["a"], [20], [80])  # END alone
    assert [span.image for span in partial] == [first]
    assert row_math.row_spans(spans, ["a"], [10], [10]) == ([], [])  # a leading pad alone
    complete, partial = row_math.row_spans(spans, ["a"], [51], [61])  # from START on
    assert (complete, partial) == ([RowSpan(0, 0, first)], [])


def test_images_outside_the_step_and_of_other_requests_count_for_nothing() -> None:
    image = ImageSpan(0, 61, 3)
    spans = {"a": (image,), "gone": (image,)}
    assert row_math.row_spans(spans, ["b", "a"], [70, 1], [70, 100]) == ([], [])
    complete, _ = row_math.row_spans(spans, ["b", "a"], [70, 61], [70, 61])
    assert complete == [RowSpan(request=1, row=73, image=image)]


def test_sm120_needs_a_kernel_for_its_heads_and_the_wide_row() -> None:
    shapes = frozenset({(64, 128), (64, 512), (32, 128)})
    assert support.sm120_reason(shapes, 64, 512) is None
    assert "32-heads-512-keys" in str(support.sm120_reason(shapes, 32, 512))
    assert "64-heads-640-keys" in str(support.sm120_reason(shapes, 64, 640))
    assert support.sm120_reason(frozenset(), 64, 512) is not None
    assert support.sm120_reason(None, 64, 512) == "flashinfer-has-no-sm120-sparse-mla"
    odd: Any = 7
    assert support.sm120_reason(odd, 64, 512) == "flashinfer-sm120-kernels-are-unknown-in-a-int"


def test_sm120_calls_fit_the_workspace() -> None:
    most = 128 << 20
    assert sm120.sm120_rows(most, 64, 512 + 512) == 64
    for keys in (512, 1024, 8704):
        rows = sm120.sm120_rows(most, 128, keys)
        tiles = -(-512 // 64) + -(-(keys - 512) // 64)
        assert 1 <= rows <= 64
        assert rows * 128 * tiles * (512 * 2 + 4) <= most
    parts = list(sm120.slices(130, 64))
    assert [(p.start, p.stop) for p in parts] == [(0, 64), (64, 128), (128, 130)]


def test_start_up_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_reason", lambda config: None)
    monkeypatch.setenv(settings.REQUIRE_VISIBILITY.name, "1")
    assert support.describe(None) == "bidirectional"
    monkeypatch.setattr(support, "_reason", lambda config: "no-kernel")
    with pytest.raises(RuntimeError, match="no-kernel"):
        support.describe(None)
    monkeypatch.setenv(settings.REQUIRE_VISIBILITY.name, "0")
    assert support.describe(None) == "causal reason=no-kernel"


# One after the other in one worker: most kernels are the same in the next release.
RELEASES = [
    pytest.param(version, marks=pytest.mark.xdist_group("vllm-visibility"))
    for version in vllm_rig.RELEASES
]


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the interpreter's launches came to, for those of the next release."""
    return tmp_path_factory.mktemp("launches")


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest, launches: Path) -> dict[str, Any]:
    environment = {"TRITON_INTERPRET": "1", "VISION_EXP_TEST_LAUNCHES": str(launches)}
    tree = vllm_rig.tree(request.param)
    return vllm_rig.observe(CHILD, tree, *ONLY, env=environment, timeout=600)


def test_the_builders_rows_follow_the_rule_and_stock_fields_stay(release: dict[str, Any]) -> None:
    assert release["builder_rows"] == {"bad": []}


def test_batches_without_an_image_in_prefill_stay_stock(release: dict[str, Any]) -> None:
    assert release["nothing_to_widen"] == {"text_only": True, "decodes_only": True}


def test_a_batch_of_unknown_order_is_an_error(release: dict[str, Any]) -> None:
    assert "unknown order" in release["lost_order"]


def close(found: dict[str, Any], limit: float, count: int = 3) -> None:
    cases = {name: value for name, value in found.items() if isinstance(value, dict)}
    assert len(cases) == count  # three kinds of layers, and more batches for one kind
    for name, value in cases.items():
        assert value["error"] < limit, name
        assert value["causal"] > 20 * limit, name  # causal rows would be seen


def test_flashmla_attends_as_the_rule_says(release: dict[str, Any]) -> None:
    close(release["flashmla"], 1e-4, count=5)


def test_a_layer_that_widened_no_image_is_named(release: dict[str, Any]) -> None:
    named = ["layers.7 (attention)"]
    assert release["passed_by"] == {
        "as it should be": [],
        "a builder with its own build": named,
        "a class with its own prefill": named,
        "index rows by another name": named,
        "a step of text": named,
    }


def test_rocm_attends_as_the_rule_says(release: dict[str, Any]) -> None:
    close(release["rocm"], 1e-4)
    assert release["rocm"]["metadata"] == "DeepseekV4ROCMAiterSparseSWAMetadata"
    assert release["rocm"]["text checkpoint"]


def test_flashinfer_sm120_attends_as_the_rule_says(release: dict[str, Any]) -> None:
    close(release["flashinfer_sm120"], 1e-4)
    assert release["flashinfer_sm120"]["widths"] == [128, 512]
    assert release["flashinfer_sm120"]["rows of wide calls"] <= 64


def test_flashinfer_sm100_attends_as_the_rule_says(release: dict[str, Any]) -> None:
    close(release["flashinfer_sm100"], 5e-3)  # results are stored as BF16


def test_a_machine_without_a_gpu_says_causal(release: dict[str, Any]) -> None:
    found = release["described"]
    assert found["cpu"] == "causal reason=platform-is-not-cuda-or-rocm"
    assert found["missing"] is None  # every function that is wrapped exists
    assert found["rocm"] == "bidirectional"
    assert found["another rocm"] == (
        "causal reason=release-lacks-DeepseekV4ROCMAiterMLAAttention._forward_prefill"
    )
    assert "platform-is-not-cuda" in found["required"]


def test_drafting_without_a_kernel_is_refused_before_weights_load(release: dict[str, Any]) -> None:
    found = release["drafting"]
    assert found["keys"] == found["builder"] != 0
    accepted = {name for name, said in found.items() if said == "accepted"}
    assert accepted == {
        "sm12x drafts too",
        "other none",
        "other images alone",
        "other drafts too",
        "cpu",
    }
    for name in ("sm12x none", "sm12x images alone"):
        assert found[name].startswith("[vision-exp] DSpark cannot draft on this GPU (flashinfer-")
        assert "install flashinfer-python 0.6.18" in found[name]
    assert f"32-heads-{found['keys']}-keys" in found["sm12x images alone"]


def test_sm100_copies_no_more_keys_than_it_says(release: dict[str, Any]) -> None:
    found = release["flashinfer_sm100_long"]
    close(found, 5e-3, count=1)
    assert found["most"] <= found["limit"]
    assert found["calls"] > 20


def test_sm100_takes_a_long_image_in_parts() -> None:
    buffer = SimpleNamespace(shape=(4096, 512))
    ends = {(4, 1 << 16): 381, (4, 1 << 20): 32, (128, 1 << 20): 381, (1, 1 << 20): 381}
    for (ratio, stop), rows in ends.items():
        layer = SimpleNamespace(compress_ratio=ratio, topk_indices_buffer=buffer)
        span = RowSpan(0, 0, ImageSpan(stop - 381, stop))
        assert flashinfer.sm100_rows(layer, span) == rows


def test_keys_beyond_the_caches_table_are_an_error_before_the_kernel() -> None:
    table = torch.zeros((1, 6), dtype=torch.int32)
    metadata = SimpleNamespace(block_table=table, block_size=64, num_decodes=0)
    for stop, good in ((384, True), (385, False)):
        span = RowSpan(0, 0, ImageSpan(100, stop))
        none = torch.zeros(0)
        seen = row_math.ImageVisibility(none, none, none, (span,), WINDOW, 384)
        if good:
            slots, lens = sm120.slots(seen, metadata)
            assert int(slots.max()) < 64
            assert int(lens.max()) == stop
        else:
            with pytest.raises(ValueError, match="table has 6 pages of 64"):
                sm120.slots(seen, metadata)


@pytest.mark.parametrize(("page", "good"), [(0, True), (6, True), (7, False), (-1, False)])
def test_a_page_outside_the_cache_is_an_error_before_the_kernel(page: int, good: bool) -> None:
    """Pages that no row uses may hold anything: the table's end is not written."""
    table = torch.tensor([[3, 2, page, 99]], dtype=torch.int32)
    metadata = SimpleNamespace(block_table=table, block_size=64, num_decodes=0)
    none = torch.zeros(0)
    span = RowSpan(0, 0, ImageSpan(10, 130))
    seen = row_math.ImageVisibility(none, none, none, (span,), WINDOW, 384)
    if good:
        assert int(sm120.slots(seen, metadata, 7)[0].max()) < 7 * 64
    else:
        with pytest.raises(RuntimeError, match="outside the cache's 7"):
            sm120.slots(seen, metadata, 7)
