"""The real model class in small sizes on the CPU: construction and embeddings."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import cpu_model
import torch
from checks import check, equal, raises
from rig_model import Rig, noise
from vllm.config import VllmConfig

START, PAD, IMAGE, NEWLINE, END = range(129257, 129262)


@check
def instances_carry_what_the_runners_read(rig: Rig) -> None:
    from vllm.model_executor.models.interfaces import (
        SupportsEagle3,
        is_mixture_of_experts,
        requires_raw_input_tokens,
        supports_multimodal,
        supports_multimodal_encoder_tp_data,
        supports_pp,
    )

    model = cpu_model.build(rig, "small")
    equal(type(model).__name__, "DeepseekV4ForCausalLM")
    equal(supports_multimodal(model), True)
    equal(requires_raw_input_tokens(model), True)
    equal(supports_multimodal_encoder_tp_data(model), True)
    equal(model.supports_multimodal_raw_input_only, False)
    equal(model.get_language_model() is model, True)
    equal(hasattr(model.get_language_model(), "lm_head"), True)
    equal(model.get_language_model().model is model.model, True)
    equal(hasattr(model, "get_mm_mapping"), False)
    equal(hasattr(type(model), "get_mtp_target_hidden_states"), True)
    equal(model.config.image_token_index, 129264)
    equal(model.get_placeholder_str("image", 1), "<｜deepseek_image｜>")
    with raises(ValueError, "audio"):
        model.get_placeholder_str("audio", 1)
    equal(is_mixture_of_experts(model), True)
    equal(supports_pp(model), True)
    if SupportsEagle3 not in type(model).text_class.__mro__:
        return  # before 0.25 the model itself has no hooks for drafts
    equal(isinstance(model, SupportsEagle3), True)
    model.set_aux_hidden_state_layers((1, 2))
    equal(tuple(model.model.aux_hidden_state_layers), (1, 2), "aux hidden states")
    default = model.get_eagle3_default_aux_hidden_state_layers()
    equal(default, (2, 2, 1), "default aux layers of four")


@check
def a_worker_says_what_holds_after_its_self_test(rig: Rig) -> None:
    """The wrapper of vLLM's own worker over the real model; a step of nothing is refused."""
    from vllm.v1.worker.gpu_worker import Worker

    from vision_exp.model.selftest import SelfTestError

    model = cpu_model.build(rig, "small")
    spec = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=256))
    runner = SimpleNamespace(
        get_model=lambda: model,
        kv_cache_config=SimpleNamespace(kv_cache_groups=[spec], num_blocks=9),
    )
    worker = object.__new__(Worker)
    worker.vllm_config = VllmConfig(model_config=rig.model_config(rig.checkpoint("small")))
    worker.model_runner = runner
    worker.execute_model = worker.sample_tokens = lambda *args: None
    wrapper = Worker.compile_or_warm_up_model.__dict__["__vision_exp_wrapper__"]
    names = ", ".join(f"model.layers.{index} (routing)" for index in range(4))
    with raises(SelfTestError, "the start is refused", f"{names} on rank 0"):
        wrapper(lambda worker: None, worker)
    with mock.patch.dict(os.environ, VISION_EXP_SELF_TEST="0"):
        equal(wrapper(lambda worker: "warm", worker), "warm")


def forward_images(
    model: Any, processor: Any, rig: Rig, images: Iterable[Any], encode: Any = None
) -> Any:
    """(processed prompt, rows): embed_multimodal on what the processor made of the images.

    With `encode`, that function of encoder.py instead, each rank for itself.
    """
    from vllm.multimodal.utils import group_and_batch_mm_kwargs

    images = list(images)
    made = rig.apply(processor, [4] + [129264] * len(images), images)
    items = [("image", item) for item in made["mm_kwargs"]["image"]]
    ((_, _, batch),) = group_and_batch_mm_kwargs(items)
    with torch.inference_mode():  # as vLLM's runners
        if encode is not None:
            return made, encode(model, data_parallel=False, **batch)
        return made, model.embed_multimodal(**batch)


@check
def embeddings_of_a_prompt_with_images(rig: Rig) -> None:
    """Words, learned vectors and tower rows each at their place, from processor to embeddings."""
    from vision_exp.image.transform import image_to_patches
    from vision_exp.layout import build_block

    model = cpu_model.build(rig, "small")
    model.load_weights(cpu_model.checkpoint(rig, "small").items())
    processor = rig.processor()
    images = [noise(640, 480), noise(100, 900, 1), noise(640, 480, 2)]
    made, rows = forward_images(model, processor, rig, images)
    ids = torch.tensor(made["prompt_token_ids"])
    mask = torch.zeros(len(ids), dtype=torch.bool)
    for one in made["mm_placeholders"]["image"]:
        mask[one.offset : one.offset + one.length] = one.is_embed
    embeds = model.embed_input_ids(ids, multimodal_embeddings=rows, is_multimodal=mask)
    equal(tuple(embeds.shape), (len(ids), model.config.hidden_size))
    words = model.model.embed_input_ids(ids)
    for kind, name in ((START, "start"), (PAD, "pad"), (NEWLINE, "newline"), (END, "end")):
        vector = getattr(model, f"image_{name}")
        equal(bool((embeds[ids == kind] == vector).all()), True, name)
    text = (ids < START) | (ids > END)
    equal(torch.equal(embeds[text], words[text]), True, "words")
    # One image alone through tower and aligner, its rows put in the order of its block.
    for image, one in zip(images, made["mm_placeholders"]["image"], strict=True):
        alone = image_to_patches(image, processor.info.vision)
        raster = model.aligner(model.vision(alone.patches, alone.vit_grid), alone.vit_grid)
        order = build_block(alone.llm_grid, one.offset).perm
        inside = slice(one.offset, one.offset + one.length)
        found = embeds[inside][one.is_embed].float()
        expected = raster[order.long()].float()
        error = (found - expected).norm() / expected.norm()
        # Packed and alone differ by the order in which BF16 matrix products are summed.
        equal(bool(error < 5e-3), True, f"rows of one image, relative error {error}")
    # In chunks, as prefill splits a prompt, and with the mask as another sequence type.
    cut = len(ids) // 2
    before = int(mask[:cut].sum())
    flat = torch.cat(tuple(rows))
    halves = torch.cat([
        model.embed_input_ids(ids[:cut], multimodal_embeddings=[flat[:before]],
                              is_multimodal=mask[:cut]),
        model.embed_input_ids(ids[cut:], multimodal_embeddings=flat[before:],
                              is_multimodal=mask[cut:]),
    ])  # fmt: skip
    equal(torch.equal(halves, embeds), True, "chunks")
    equal(torch.equal(model.embed_input_ids(ids[text]), words[text]), True, "text alone")
    with raises(ValueError, "image embeddings for"):
        model.embed_input_ids(ids, multimodal_embeddings=[flat[1:]], is_multimodal=mask)


@check
def the_mtp_draft_ignores_image_keywords(rig: Rig) -> None:
    import vllm.models.deepseek_v4.nvidia.mtp as mtp

    class Inner:
        def embed_input_ids(self, ids: torch.Tensor) -> torch.Tensor:
            return ids * 2

    class Draft:
        model = Inner()

    ids = torch.tensor([1, 2])
    embed = mtp.DeepSeekV4MTP.embed_input_ids
    equal(embed(Draft(), ids).tolist(), [2, 4])
    found = embed(Draft(), ids, multimodal_embeddings=[ids], is_multimodal=ids > 1)
    equal(found.tolist(), [2, 4])


@check
def data_mode_spreads_images_over_ranks(rig: Rig) -> None:
    """Two ranks simulated in turn: what each gathers is what one rank alone computes."""
    import vllm.distributed as dist

    from vision_exp.model import encoder
    from vision_exp.model.encoder import assign_images

    model = cpu_model.build(rig, "small", model_options={"mm_encoder_tp_mode": "data"})
    model.load_weights(cpu_model.checkpoint(rig, "small").items())
    equal(model.data_parallel, True)
    processor = rig.processor()
    images = [noise(640, 480), noise(100, 900, 1), noise(1400, 1400, 2)]
    made, alone = forward_images(model, processor, rig, images)
    names = (
        "get_tensor_model_parallel_rank",
        "get_tensor_model_parallel_world_size",
        "tensor_model_parallel_all_gather",
    )
    stock = {name: getattr(dist, name) for name in names}

    def as_rank(rank: int, ranks: int, gather: Any) -> list[torch.Tensor]:
        fakes = (lambda: rank, lambda: ranks, lambda block, dim: gather(block))
        try:
            for name, fake in zip(names, fakes, strict=True):
                setattr(dist, name, fake)
            return forward_images(model, processor, rig, images)[1]
        finally:
            for name, function in stock.items():
                setattr(dist, name, function)

    for ranks in (2, 4):  # with four, one rank has no image
        blocks: list[torch.Tensor] = []
        for rank in range(ranks):
            as_rank(rank, ranks, lambda block: (blocks.append(block), block.repeat(ranks, 1))[1])  # noqa: B023
        equal(len({block.shape for block in blocks}), 1, "equal blocks from all ranks")
        shared = mock.patch.object(encoder, "assign_images", wraps=assign_images)
        with shared as asked:
            rows = as_rank(0, ranks, lambda block: torch.cat(blocks))  # noqa: B023
        patches = [int(item.get_data()["vit_grid"].prod()) for item in made["mm_kwargs"]["image"]]
        equal(asked.call_args.args, (patches, ranks), "shared out by what they cost the tower")
        for one, other in zip(alone, rows, strict=True):
            error = (one.float() - other.float()).norm() / one.float().norm()
            equal(bool(error < 5e-3), True, f"{ranks} ranks: relative error {error}")

    assert_balanced(assign_images)


def assert_balanced(assign_images: Any) -> None:
    """Every image goes to one rank, and no rank waits long."""
    equal(assign_images([5, 9, 4], 2), [[1], [0, 2]])
    draw = random.Random(0)
    for ranks in range(1, 9):
        for count in range(21):
            sizes = [draw.randint(1, 3000) for _ in range(count)]
            assigned = assign_images(sizes, ranks)
            equal(len(assigned), ranks)
            equal(sorted(sum(assigned, [])), list(range(count)))
            # Largest first: the busiest rank is at most one image above the average.
            busiest = max(sum(sizes[i] for i in numbers) for numbers in assigned)
            equal(busiest <= sum(sizes) / ranks + max(sizes, default=0), True, "the busiest rank")


@check
def the_tower_is_told_of_vllms_flash_attention(rig: Rig) -> None:
    """Asked while vLLM's config is known: what it names decides. A Hopper is stood for."""
    from vllm.config import AttentionConfig, VllmConfig, set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends import fa_utils

    from vision_exp.tower.attention import Flash, available_flash

    equal(cpu_model.build(rig, "small").vision.flash, Flash(), "none on a CPU, and it was asked")
    # Its own module, which ends in an ImportError where there are no compiled kernels.
    interface = ModuleType("vllm.vllm_flash_attn.flash_attn_interface")
    vars(interface).update(
        is_fa_version_supported=(2, 3).__contains__, fa_version_unsupported_reason=str
    )
    package = ModuleType("vllm.vllm_flash_attn")
    fakes = (
        mock.patch.object(fa_utils, "flash_attn_varlen_func", None, create=True),
        mock.patch.dict(sys.modules, {one.__name__: one for one in (package, interface)}),
        mock.patch.object(
            type(current_platform), "get_device_capability", lambda *_: DeviceCapability(9, 0)
        ),
    )
    with fakes[0], fakes[1], fakes[2]:
        equal(available_flash(), Flash((3, 2)), "outside of any config")
        for version, expected in ((None, Flash((3, 2))), (2, Flash((2,), asked=True))):
            config = VllmConfig(attention_config=AttentionConfig(flash_attn_version=version))
            with set_current_vllm_config(config):
                equal(available_flash(), expected, f"flash_attn_version {version}")
