"""Checks of what a release's metadata builder says each row sees, and of the start-up answer."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import rocm_stand_in
import torch
from rig_attention import replaced
from rig_visibility import (
    BATCHES,
    WINDOW,
    built,
    decodes_only,
    long_image,
    metadata,
    new_builder,
    offsets,
    seen_by,
    slot,
    text_only,
)

from vision_exp import settings
from vision_exp.visibility import sm120, spans, support

real_describe = support.describe


def builder_rows() -> dict[str, Any]:
    """The wrapped builder on every batch: distances, slots and stock fields against the rule."""
    bad: list[Any] = []
    for make in (*BATCHES, *((lambda work=work: work) for work in offsets())):
        work, wide = built(make)
        plain = metadata(new_builder(vision=False), work, images=True)
        if spans.get(plain) is not None:
            bad.append("text checkpoint")
        bad += differing(plain, wide)
        visible = spans.get(wide)
        base, row = wide.num_decodes, 0
        indices, lens = sm120.slots(visible, wide)
        by_row = {int(r): i for i, r in enumerate(visible.rows)}
        for i, request in enumerate(work.requests[base:]):
            for position in range(request.total - request.new, request.total):
                keys = seen_by(request, position)
                back, ahead = int(visible.lookback[row]), int(visible.lookahead[row])
                first = max(min(position - WINDOW + 1, position - back), 0)
                if range(first, position + ahead + 1) != keys:
                    bad.append((request, position, back, ahead))
                if (row in by_row) != (seen_by(request, position, False) != keys) and not any(
                    start <= position <= end for start, end in request.images
                ):
                    bad.append(("image row", request, position))
                if row in by_row:
                    at = by_row[row]
                    want = [slot(work, base + i, p) for p in keys]
                    got = indices[at, 0].tolist()
                    if got[: len(want)] != want or any(v != -1 for v in got[len(want) :]):
                        bad.append(("slots", request, position))
                    if int(lens[at]) != len(want):
                        bad.append(("lens", request, position))
                row += 1
    return {"bad": bad[:5]}


def differing(plain: Any, wide: Any) -> list[str]:
    """Fields of the stock metadata that the wrapper changed."""
    found = []
    for name, value in vars(plain).items():
        other = getattr(wide, name)
        if isinstance(value, torch.Tensor):
            if value.shape != other.shape or not torch.equal(value, other):
                found.append(name)
        elif not name.startswith("tile_sched") and value != other:
            found.append(name)
    return found


def nothing_to_widen() -> dict[str, Any]:
    """Text-only batches and decodes get nothing, and no function of the overlay runs."""
    builder, out = new_builder(vision=True), {}
    for make in (text_only, decodes_only):
        out[make.__name__] = spans.get(metadata(builder, make(), images=True)) is None
    return out


def lost_order() -> str:
    try:
        metadata(new_builder(vision=True), long_image(), images=True, order=False)
    except RuntimeError as error:
        return str(error)
    return "accepted"


def described() -> dict[str, Any]:
    """The start-up answer of this (CPU) installation, as it is and with parts of it replaced."""
    config = SimpleNamespace(parallel_config=SimpleNamespace(), model_config=None)
    out: dict[str, Any] = {"cpu": real_describe(config), "missing": support.missing_hooks("cuda")}
    os.environ[settings.REQUIRE_VISIBILITY.name] = "1"
    try:
        real_describe(config)
        out["required"] = "accepted"
    except RuntimeError as error:
        out["required"] = str(error)
    finally:
        del os.environ[settings.REQUIRE_VISIBILITY.name]
    attention = rocm_stand_in.modules()["rocm"].DeepseekV4ROCMAiterMLAAttention
    with rocm_stand_in.platform():
        out["rocm"] = real_describe(config)
        with mock.patch.object(attention, "_forward_prefill", None):
            out["another rocm"] = real_describe(config)
    return out


def drafting() -> dict[str, Any]:
    """What a start with DSpark says on SM12x, by what FlashInfer's table has."""
    platforms = importlib.import_module("vllm.platforms")
    model = importlib.import_module("vllm.models.deepseek_v4.nvidia.model")
    flashinfer = importlib.import_module("vllm.models.deepseek_v4.nvidia.flashinfer_sparse")
    hf_config = SimpleNamespace(sliding_window=WINDOW, num_attention_heads=64)
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf_config),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        speculative_config=SimpleNamespace(
            method="dspark",
            use_dspark=lambda: True,
            parallel_drafting=True,
            num_speculative_tokens=6,
        ),
    )
    keys = support.draft_keys(WINDOW, 6)
    builder = new_builder(vision=True, speculative=config.speculative_config)
    out: dict[str, Any] = {"keys": keys, "builder": builder.noncausal_index_width}
    tables: dict[str, Any] = {
        "none": None,
        "images alone": frozenset({(32, 512), (64, 192), (64, 256)}),
        "drafts too": frozenset({(32, 512), (32, keys)}),
    }
    classes = {
        "sm12x": flashinfer.DeepseekV4FlashInferSM120Attention,
        "other": type("DeepseekV4FlashMLAAttention", (), {}),
    }
    for gpu, attention in classes.items():
        for name, table in tables.items():
            with (
                replaced(platforms, current_platform=SimpleNamespace(is_cuda=lambda: True)),
                replaced(model, _select_dsv4_attn_cls=lambda config, cls=attention: cls),
                replaced(support, sm120_table=lambda found=table: found),
            ):
                out[f"{gpu} {name}"] = said_by(lambda: support.check_drafting(config))
    out["cpu"] = said_by(lambda: support.check_drafting(config))
    return out


def said_by(call: Callable[[], None]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "accepted"
