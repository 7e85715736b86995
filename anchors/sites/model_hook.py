"""The model hook: each platform's stock model class gets tower, weights and routing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from anchors.kit import hook
from anchors.kit.anchor import (
    ABSENT,
    APPLIES,
    MIXED,
    TWICE,
    Anchor,
    Case,
    Match,
    Values,
    classes,
    exactly_one,
    functions,
    imported,
    walk,
)

if TYPE_CHECKING:
    import libcst as cst

_CLASS = "DeepseekV4ForCausalLM"
_CLASSES = (_CLASS, "DeepseekV4Model", "DeepseekV4MoE", "DeepseekV4DecoderLayer")
_MAPPER = "_make_deepseek_v4_weights_mapper"
_ROUTER = "fused_topk_bias"
_SUFFIX = ".ffn.gate.bias"


def _find(module: cst.Module, *, router: bool) -> Match:
    for name in _CLASSES:
        exactly_one(f"top-level class {name}", len(classes(module, name)))
    mappers = functions(module, _MAPPER)
    exactly_one(f"top-level function {_MAPPER}", len(mappers))
    if router:
        exactly_one(f"top-level import of {_ROUTER}", imported(module, _ROUTER))
    # A fork that keeps the gate elsewhere (`norm_gate`) has another suffix here, and the routing
    # bias would have no home.
    exactly_one(f'suffix "{_SUFFIX}" in {_MAPPER}', _strings(mappers[0], _SUFFIX))
    return Match()


def _strings(node: cst.CSTNode, value: str) -> int:
    import libcst as cst

    return sum(
        isinstance(part, cst.SimpleString) and part.evaluated_value == value for part in walk(node)
    )


def _render(match: Match, values: Values) -> str:
    return hook.render("model", _CLASS, values)


_SOURCE = """\
from vllm.router import (
    fused_topk_bias,
)


class DeepseekV4MoE:
    pass


class DeepseekV4DecoderLayer:
    pass


class DeepseekV4Model:
    pass


def _make_deepseek_v4_weights_mapper(expert_dtype):
    return {".ffn.gate.bias": ".ffn.gate.e_score_correction_bias"}


class DeepseekV4ForCausalLM:
    model_cls = DeepseekV4Model
"""

_ON_BOTH = (
    Case(APPLIES, _SOURCE),
    Case(APPLIES, _SOURCE.replace("(expert_dtype)", "(expert_dtype, extra=None)")),
    Case(APPLIES, _SOURCE.replace("class DeepseekV4MoE:", "class DeepseekV4MoE(Base):")),
    Case(ABSENT, _SOURCE.replace("class DeepseekV4MoE:", "class DeepseekV4Experts:")),
    Case(ABSENT, _SOURCE.replace(".ffn.gate.bias", ".ffn.norm_gate.bias")),
    Case(ABSENT, _SOURCE.replace(_MAPPER, "_make_weights_mapper")),
    Case(TWICE, _SOURCE + "\n\nclass DeepseekV4Model:\n    pass\n"),
)

_NVIDIA = Anchor(
    id="model-hook",
    file="models/deepseek_v4/nvidia/model.py",
    where="end of the file, after class DeepseekV4ForCausalLM",
    what="hook that gives vision checkpoints their tower, weights and routing",
    why=(
        "The checkpoint declares the text-only architecture and carries 316 tensors that the "
        "stock class has no place for; class attributes stay stock, methods are wrapped."
    ),
    until="vLLM 0.30.0, which serves the checkpoint as DeepseekV4ForConditionalGeneration",
    upstream="vllm-project/vllm pull request 54566",
    find=partial(_find, router=True),
    render=_render,
    cases=(
        *_ON_BOTH,
        Case(APPLIES, _SOURCE.replace("    fused_topk_bias,", "    a, fused_topk_bias, b,")),
        Case(ABSENT, _SOURCE.replace(_ROUTER, "fused_topk")),
        Case(TWICE, _SOURCE + "\n\nfrom vllm.other import fused_topk_bias\n"),
        Case(MIXED, _SOURCE + "# >>> vision-exp:model-hook\n"),
    ),
    order=20,
)

ANCHORS = (
    _NVIDIA,
    replace(
        _NVIDIA,
        id="amd-model-hook",
        file="models/deepseek_v4/amd/model.py",
        what="the same hook, which ROCm builds import. Not run on AMD hardware",
        find=partial(_find, router=False),
        cases=(
            *_ON_BOTH,
            Case(APPLIES, _SOURCE.replace(_ROUTER, "fused_topk")),
            Case(MIXED, _SOURCE + "# >>> vision-exp:amd-model-hook\n"),
        ),
        order=60,
    ),
)
