"""The checkpoint's tensors in the real model class, small and on the CPU: each to its parameter."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import cpu_model
import torch
from checks import check, equal, raises
from rig_model import Rig

START = 129257
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
    arrive(rig, cpu_model.build(rig, "released-layers", **RELEASED_LAYERS))


def arrive(rig: Rig, model: Any) -> None:
    """Loads the checkpoint of the released numbers of layers, and compares all 316 tensors."""
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
def a_tower_in_float16_is_converted(rig: Rig) -> None:
    model = cpu_model.build(rig, "small")
    weights = cpu_model.checkpoint(rig, "small")
    tower = {name for name in extra_names(model.config) if name in dict(model.named_parameters())}
    model.load_weights(
        (name, tensor.half() if name in tower else tensor) for name, tensor in weights.items()
    )
    for name in tower:
        found = model.get_parameter(name).data
        equal(torch.equal(found, weights[name].half().to(found.dtype)), True, name)
    wrong = {**weights, "image_pad": weights["image_pad"].double()}
    with raises(RuntimeError, "image_pad", "float64"):
        cpu_model.build(rig, "small").load_weights(iter(wrong.items()))


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
def a_rank_loads_its_part_and_says_what_it_leaves(rig: Rig) -> None:
    """A later pipeline rank: no tower, and one of the layers is another rank's."""
    from vision_exp.model import weights as loading

    model = cpu_model.build(rig, "small")
    model.tower_disabled_reason = "only the first pipeline rank embeds images"
    for name in ("vision", "aligner", "image_start", "image_end", "image_newline", "image_pad"):
        delattr(model, name)
    model.model.layers[2] = torch.nn.Identity()
    weights = cpu_model.checkpoint(rig, "small")
    passed: list[str] = []

    def stock(stream: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        passed.extend(name for name, _ in stream)
        return {"of.vllm"}

    loaded = loading.load_weights(model, stock, iter(weights.items()))
    bias = "model.layers.{}.ffn.gate.e_score_correction_bias_vl"
    equal(loaded, {"of.vllm", *(bias.format(layer) for layer in (0, 1, 3))}, "loaded here")
    extra = set(extra_names(model.config))
    drafts = {name for name in extra if name.startswith("mtp.")}
    equal(sorted(extra & set(passed)), sorted(drafts), "passed on to vLLM's loader")
    gone = {name: tensor for name, tensor in weights.items() if name != "layers.3.ffn.gate.bias_vl"}
    del model.vision_tensors_loaded
    with raises(loading.WeightsError, "lacks 1 tensors: layers.3.ffn.gate.bias_vl"):
        loading.load_weights(model, stock, iter(gone.items()))


@check
def a_build_that_differs_from_the_checkpoint_is_refused(rig: Rig) -> None:
    from vision_exp.model import weights as loading

    weights = cpu_model.checkpoint(rig, "small")
    lacks, extra = cpu_model.build(rig, "small"), cpu_model.build(rig, "small")
    del lacks.vision.blocks[1].norm2
    extra.vision.more = torch.nn.Parameter(torch.zeros(1))
    for model, name in ((lacks, "vision.blocks.1.norm2.weight"), (extra, "vision.more")):
        with raises(loading.WeightsError, f"tower parameters differ: {name}"):
            model.load_weights(iter(weights.items()))
    text = {name: value for name, value in weights.items() if not name.startswith("vision.blocks")}
    with raises(loading.WeightsError, "lacks 16 tensors: vision.blocks.0.attn", " and 8 more"):
        cpu_model.build(rig, "small").load_weights(iter(text.items()))


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
