"""Which rows were routed by whom in the real MTP and DSpark modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from checks import check, equal, raises
from rig_routing import HIDDEN, Rig, batch, expected, same, spec_config
from torch import nn

from vision_exp.routing import select


class Block(nn.Module):
    """Stands for a decoder layer: the real MoE without attention."""

    use_sequence_parallel = False
    use_fused_mhc = False  # asked by amd/

    def __init__(self, rig: Rig, layer: int) -> None:
        super().__init__()
        self.ffn = rig.moe(layer)
        self.seen: list[Any] = []

    def forward(self, x, positions, input_ids, *rest):
        self.seen.append(input_ids)
        self.ffn(x.flatten(0, -2)[: x.shape[0]].to(torch.bfloat16), input_ids)
        return x, None, None, None


@check
def mtp_draft_hands_its_ids_on(rig: Rig) -> None:
    config = spec_config(rig.config)
    rig.config, target = config, rig.config
    try:
        layer = rig.mtp.DeepSeekV4MultiTokenPredictorLayer.__new__(
            rig.mtp.DeepSeekV4MultiTokenPredictorLayer
        )
        nn.Module.__init__(layer)
        layer.mtp_block = Block(rig, 4)
    finally:
        rig.config = target
    layer.config, layer.hc_mult = SimpleNamespace(hidden_size=HIDDEN), 1
    norm = SimpleNamespace(weight=SimpleNamespace(data=None), variance_epsilon=0.0)
    object.__setattr__(layer, "enorm", norm)
    object.__setattr__(layer, "hnorm", norm)
    object.__setattr__(layer, "h_proj", lambda rows: rows)
    object.__setattr__(layer, "e_proj", lambda rows: rows)
    hidden, ids, mask = batch(10, [1, 2])
    kernels = {
        "fused_mtp_input_rmsnorm": lambda embeds, positions, hidden, *rest: (embeds, hidden),
        "mhc_post_tilelang": lambda rows, *rest: rows,
        "sp_all_gather": lambda rows: rows,
    }
    with mock.patch.dict(vars(rig.mtp), kernels):
        arguments = (ids, torch.arange(10), torch.zeros(10, HIDDEN), hidden.float())
        rig.routed.clear()
        with rig.running(images=True):
            layer(*arguments)
        (seen,) = layer.mtp_block.seen
        equal(seen is ids, True, "the block gets the ids")
        same(rig.routed[0], expected(layer.mtp_block.ffn, hidden, ids, mask))
        equal(len(layer.mtp_block._forward_pre_hooks), 0)
        with rig.running(images=False):
            layer(*arguments)
        equal(layer.mtp_block.seen[-1], None, "a text step runs as in stock vLLM")
        with rig.running(images=True), raises(select.MissingTokenIds, "without"):
            layer(None, *arguments[1:])
        if hasattr(rig.mtp, "sp_shard"):
            layer.mtp_block.use_sequence_parallel = True
            shard = {"sp_shard": lambda rows: rows[:5]}
            with mock.patch.dict(vars(rig.mtp), shard), rig.running(images=True):
                layer(*arguments)
            equal(layer.mtp_block.seen[-1].tolist(), ids[:5].tolist(), "ids are cut like rows")


@check
def mtp_draft_keeps_its_ids_under_the_v1_proposer(rig: Rig) -> None:
    draft = SimpleNamespace(model=SimpleNamespace(embed_input_ids=lambda ids: "rows"))
    embed = rig.mtp.DeepSeekV4MTP.embed_input_ids
    equal(embed(draft, torch.tensor([1])), "rows")
    with raises(TypeError):
        embed(draft, torch.tensor([[1]]), multimodal_embeddings=None)


@check
def dspark_draft_routes_image_rows(rig: Rig) -> None:
    model = rig.dspark.DSparkDeepseekV4Model.__new__(rig.dspark.DSparkDeepseekV4Model)
    nn.Module.__init__(model)
    model.hc_mult, model.use_sequence_parallel = 1, False
    model.layers = nn.ModuleList(Block(rig, 4 + at) for at in range(3))
    model.hc_head_op = lambda rows, *rest: rows  # of amd/
    model.hc_head_fn = model.hc_head_scale = model.hc_head_base = None
    model.rms_norm_eps = model.hc_eps = 0.0
    hidden, ids, mask = batch(10, [1, 2])
    kernels = {
        "mhc_post_tilelang": lambda rows, *rest: rows,
        "hc_head_fused_kernel_tilelang": lambda rows, *rest: rows,
    }
    rig.routed.clear()
    with mock.patch.dict(vars(rig.dspark), kernels), rig.running(images=True):
        model(ids, torch.arange(10), hidden)
    equal(len(rig.routed), 3)
    for block, found in zip(model.layers, rig.routed, strict=True):
        same(found, expected(block.ffn, hidden, ids, mask))
