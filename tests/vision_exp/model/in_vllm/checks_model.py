"""The real model class in small sizes on the CPU: construction, weights, embeddings."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import cpu_model
import torch
from checks import check, equal, raises
from rig_model import Rig, noise

START, PAD, IMAGE, NEWLINE, END = range(129257, 129262)
Weights = dict[str, torch.Tensor]
# 32 vision layers, 43 of the language model and 3 drafts, as released: 316 extra tensors.
RELEASED_LAYERS = {"vision_n_layers": 32, "num_hidden_layers": 43}


def extra_names(config: Any) -> list[str]:
    """The names of checkpoint.md, spelled out independently of the overlay."""
    names = ["vision.patch_embed.proj.weight", "vision.patch_embed.proj.bias"]
    for n in range(config.vision_n_layers):
        for part in (
            "norm1.weight", "norm2.weight", "attn.wqkv.weight", "attn.wqkv.bias",
            "attn.wo.weight", "attn.wo.bias", "mlp.w1.weight", "mlp.w2.weight",
        ):  # fmt: skip
            names.append(f"vision.blocks.{n}.{part}")
    names.append("vision.norm.weight")
    names += [f"aligner.{w}.{part}" for w in ("w1", "w2") for part in ("weight", "bias")]
    names += [f"image_{name}" for name in ("start", "end", "newline", "pad")]
    names += [f"layers.{n}.ffn.gate.bias_vl" for n in range(config.num_hidden_layers)]
    names += [f"mtp.{n}.ffn.gate.bias_vl" for n in range(config.num_nextn_predict_layers)]
    names += [f"layers.{n}.ffn.gate.bias" for n in range(config.num_hash_layers)]
    return names


def shuffled(weights: Weights, seed: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    names = sorted(weights)
    random.Random(seed).shuffle(names)
    for name in names:
        yield name, weights[name]


@check
def the_316_tensors_arrive_value_by_value(rig: Rig) -> None:
    """Written with safetensors, read back as a stream in random order, compared bit by bit."""
    model = cpu_model.build(rig, "released-layers", **RELEASED_LAYERS)
    weights = cpu_model.checkpoint(rig, "released-layers", **RELEASED_LAYERS)
    extra = extra_names(model.config)
    equal(len(extra), 316, "extra tensors")
    equal(sorted(set(extra) - weights.keys()), [], "names that the checkpoint lacks")
    loaded = model.load_weights(shuffled(weights))
    parameters = dict(model.named_parameters())
    equal(sorted(parameters.keys() - loaded), [], "parameters never loaded")
    homes = {name: name for name in extra if name in parameters} | {
        f"layers.{n}.ffn.gate.bias_vl": f"model.layers.{n}.ffn.gate.e_score_correction_bias_vl"
        for n in range(43)
    }
    equal(len(homes), 316 - 3 - 3, "tensors with a home in the target")
    for name, home in homes.items():
        found, expected = parameters[home].data, weights[name]
        equal(torch.equal(found, expected.to(found.dtype)), True, name)
    # What vLLM's own names map to is untouched by the extra ones.
    for layer in range(3, 43):
        name = f"layers.{layer}.ffn.gate.bias"
        found = parameters[f"model.layers.{layer}.ffn.gate.e_score_correction_bias"]
        equal(torch.equal(found.data, weights[name]), True, name)
    shared = parameters["model.layers.0.ffn.shared_experts.gate_up_proj.weight"].data
    both = [weights[f"layers.0.ffn.shared_experts.{w}.weight"] for w in ("w1", "w3")]
    equal(torch.equal(shared, torch.cat(both)), True, "shared experts' w1 and w3")


@check
def weights_are_a_stream(rig: Rig) -> None:
    """Each tensor is dropped before the next is asked for: at most two are alive."""
    import gc
    import weakref

    model = cpu_model.build(rig, "small")
    weights = cpu_model.checkpoint(rig, "small")
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for name in sorted(weights):
            tensor = weights[name].clone()
            alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor
            gc.collect(0)
            most = max(most, sum(one() is not None for one in alive))

    calls = []
    stock = type(model).text_class.load_weights
    type(model).text_class.load_weights = lambda self, w: calls.append(1) or stock(self, w)
    try:
        model.load_weights(stream())
    finally:
        type(model).text_class.load_weights = stock
    equal(calls, [1], "calls of vLLM's own load_weights")
    equal(most <= 2, True, f"{most} tensors alive at once")


@check
def every_order_loads(rig: Rig) -> None:
    """Extra tensors first, last and between: the same values, vLLM's loader called once."""
    weights = cpu_model.checkpoint(rig, "small")
    extra = [name for name in weights if name in set(extra_names(cpu_model.config(rig, "small")))]
    rest = [name for name in weights if name not in extra]
    mixed = [name for pair in zip(extra, rest, strict=False) for name in pair]
    mixed += [name for name in weights if name not in mixed]
    states = []
    for order in (extra + rest, rest + extra, mixed):
        model = cpu_model.build(rig, "small")
        model.load_weights((name, weights[name]) for name in order)
        states.append({k: v for k, v in model.state_dict().items() if "experts" not in k})
    for other in states[1:]:
        equal(other.keys(), states[0].keys())
        for name, value in other.items():
            equal(torch.equal(value, states[0][name]), True, name)


@check
def wrong_weights_are_refused_by_name(rig: Rig) -> None:
    from vision_exp.model.weights import WeightsError

    good = cpu_model.checkpoint(rig, "small")
    norm, bias = "vision.blocks.1.norm2.weight", "layers.2.ffn.gate.bias_vl"
    cases: list[tuple[str, Weights]] = [
        ("image_pad", {k: v for k, v in good.items() if k != "image_pad"}),
        (norm, {k: v for k, v in good.items() if k != norm}),
        (bias, {k: v for k, v in good.items() if k != bias}),
        ("aligner.w3.weight", {**good, "aligner.w3.weight": torch.zeros(3)}),
        ("vision.blocks.7.attn.wo.bias", {**good, "vision.blocks.7.attn.wo.bias": good[norm]}),
        ("layers.9.ffn.gate.bias_vl", {**good, "layers.9.ffn.gate.bias_vl": good[bias]}),
        (norm, {**good, norm: torch.zeros(3)}),
        ("vision.patch_embed.proj.weight", {**good, "vision.patch_embed.proj.weight":
            good["vision.patch_embed.proj.weight"].T.contiguous()}),
        ("aligner.w1.weight", {**good, "aligner.w1.weight":
            good["aligner.w1.weight"].to(torch.float8_e4m3fn)}),
        (bias, {**good, bias: good[bias].to(torch.int32)}),
    ]  # fmt: skip
    for name, weights in cases:
        with raises(WeightsError, name):
            cpu_model.build(rig, "small").load_weights(weights.items())
    # Names that are nobody's still reach vLLM's own error.
    with raises(Exception, "nonsense"):
        cpu_model.build(rig, "small").load_weights([*good.items(), ("nonsense.w", good[norm])])


@check
def partial_updates_after_a_full_load(rig: Rig) -> None:
    model = cpu_model.build(rig, "small")
    weights = cpu_model.checkpoint(rig, "small")
    model.load_weights(weights.items())
    update = weights["image_start"] + 1
    model.load_weights([("image_start", update)])
    equal(torch.equal(model.image_start.data, update), True)


@check
def text_mode_has_no_tower_and_loads_the_checkpoint(rig: Rig) -> None:
    weights = cpu_model.checkpoint(rig, "small")
    for options in ({"limit_mm_per_prompt": {"image": 0}}, {"language_model_only": True}):
        model = cpu_model.build(rig, "small", model_options=options)
        for name in ("vision", "aligner", "image_start", "image_pad"):
            equal(hasattr(model, name), False, f"{name} with {options}")
        loaded = model.load_weights(shuffled(weights))
        parameters = dict(model.named_parameters())
        equal(sorted(parameters.keys() - loaded), [], "parameters never loaded")
        ids = torch.tensor([5, START, 129264])
        equal(torch.equal(model.embed_input_ids(ids), model.model.embed_input_ids(ids)), True)


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


def forward_images(
    model: Any, processor: Any, rig: Rig, pictures: Iterable[Any], encode: Any = None
) -> Any:
    """(processed prompt, rows): embed_multimodal on what the processor made of the pictures.

    With `encode`, that function of encoder.py instead, each rank for itself.
    """
    from vllm.multimodal.utils import group_and_batch_mm_kwargs

    pictures = list(pictures)
    made = rig.apply(processor, [4] + [129264] * len(pictures), pictures)
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
    pictures = [noise(640, 480), noise(100, 900, 1), noise(640, 480, 2)]
    made, rows = forward_images(model, processor, rig, pictures)
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
    # One picture alone through tower and aligner, its rows put in the order of its block.
    for picture, one in zip(pictures, made["mm_placeholders"]["image"], strict=True):
        alone = image_to_patches(picture, processor.info.vision)
        raster = model.aligner(model.vision(alone.patches, alone.vit_grid), alone.vit_grid)
        order = build_block(alone.llm_grid, one.offset).perm
        inside = slice(one.offset, one.offset + one.length)
        found = embeds[inside][one.is_embed].float()
        expected = raster[order.long()].float()
        error = (found - expected).norm() / expected.norm()
        # Packed and alone differ by the order in which BF16 matrix products are summed.
        equal(bool(error < 5e-3), True, f"rows of one picture, relative error {error}")
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

    from vision_exp.model.encoder import assign_images

    model = cpu_model.build(rig, "small", model_options={"mm_encoder_tp_mode": "data"})
    model.load_weights(cpu_model.checkpoint(rig, "small").items())
    equal(model.spread_images, True)
    processor = rig.processor()
    pictures = [noise(640, 480), noise(100, 900, 1), noise(1400, 1400, 2)]
    _, alone = forward_images(model, processor, rig, pictures)
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
            return forward_images(model, processor, rig, pictures)[1]
        finally:
            for name, function in stock.items():
                setattr(dist, name, function)

    for ranks in (2, 4):  # with four, one rank has no image
        blocks: list[torch.Tensor] = []
        for rank in range(ranks):
            as_rank(rank, ranks, lambda block: (blocks.append(block), block.repeat(ranks, 1))[1])  # noqa: B023
        equal(len({block.shape for block in blocks}), 1, "equal blocks from all ranks")
        rows = as_rank(0, ranks, lambda block: torch.cat(blocks))  # noqa: B023
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
