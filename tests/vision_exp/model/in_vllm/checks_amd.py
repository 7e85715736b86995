"""The patched modules of amd/ on a stand-in for its platform. Not run on AMD hardware."""

from __future__ import annotations

from typing import Any

import checks_weights
import cpu_model
import torch
from checks import check, equal
from rig_model import Rig

BIAS_VL = "e_score_correction_bias_vl"


@check
def amd_takes_the_316_tensors(rig: Rig) -> None:
    with cpu_model.on_rocm(rig) as amd:
        served = amd["model"].DeepseekV4ForCausalLM
        layers = checks_weights.RELEASED_LAYERS
        model = cpu_model.build_with(rig, "released-layers", served, **layers)
        equal(type(model).__module__, "vllm.models.deepseek_v4.amd.model")
        equal(model.supports_multimodal, True)
        checks_weights.arrive(rig, model)


@check
def amd_leaves_text_only_checkpoints_as_they_are(rig: Rig) -> None:
    with cpu_model.on_rocm(rig) as amd:
        served = amd["model"].DeepseekV4ForCausalLM
        model = cpu_model.build_with(rig, "small-text", served, text=True)
        equal(type(model), served)
        names = dict(model.named_parameters())
        equal([name for name in names if name.startswith("vision.") or "_vl" in name], [])
        weights = cpu_model.text_checkpoint(rig)
        equal(sorted(names.keys() - model.load_weights(iter(weights.items()))), [])


@check
def amd_drafts_load_their_bias_vl(rig: Rig) -> None:
    with cpu_model.on_rocm(rig) as amd:
        weights = cpu_model.checkpoint(rig, "small")
        loaded(amd["mtp"].DeepSeekV4MTP, weights, rig, "deepseek_mtp")
        if "dspark" in amd:
            loaded(amd["dspark"].DSparkDeepseekV4ForCausalLM, weights, rig, "deepseek_v4")


def loaded(model_class: type, weights: dict[str, torch.Tensor], rig: Rig, kind: str) -> None:
    """Loads the drafts' experts and gates by the draft's own loader, whose rename is patched.

    The rest of a draft differs: this checkpoint has DSpark's, of which MTP knows no name.
    """
    draft: Any = cpu_model.draft(rig, "small", model_class, kind)
    draft.load_weights(item for item in weights.items() if ".ffn." in item[0])
    homes = [name for name, _ in draft.named_parameters() if name.endswith(BIAS_VL)]
    equal(bool(homes), True, f"{model_class.__name__} has parameters for bias_vl")
    for number, home in enumerate(homes):
        for theirs, ours in (("bias", BIAS_VL.removesuffix("_vl")), ("bias_vl", BIAS_VL)):
            wanted = weights[f"mtp.{number}.ffn.gate.{theirs}"]
            found = draft.get_parameter(home.replace(BIAS_VL, ours)).data
            equal(torch.equal(found, wanted.to(found.dtype)), True, f"mtp.{number} {theirs}")
