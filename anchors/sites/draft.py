"""The draft loaders, `dspark.py` and `mtp.py` of each platform: two sites each, equal but for their
names."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from anchors.kit import hook, rename
from anchors.kit.anchor import ABSENT, APPLIES, MIXED, TWICE, Anchor, Case, Match, Values

if TYPE_CHECKING:
    import libcst as cst

_GUARDED = """\
class Draft(nn.Module):
    def load_weights(self, weights):
        params_dict = dict(self.named_parameters())
        for name, loaded_weight in weights:
            if name.endswith(".ffn.gate.bias"):
                name = name.replace(
                    ".ffn.gate.bias", ".ffn.gate.e_score_correction_bias"
                )
            param = params_dict[name]
"""
_GUARD = 'if name.endswith(".ffn.gate.bias"):'
_LOOSE = 'if name.split(".")[-2:] == ["gate", "bias"]:'
_SHORT = _GUARDED.replace(
    """(
                    ".ffn.gate.bias", ".ffn.gate.e_score_correction_bias"
                )""",
    '(".bias", ".e_score_correction_bias")',
)
_ALWAYS = """\
class Draft(nn.Module):
    def load_weights(self, weights):
        params = dict(self.named_parameters())
        for key, tensor in weights:
            key = key.replace(".ffn.gate.bias", ".ffn.gate.e_score_correction_bias")
            if key not in params:
                continue
            params[key].copy_(tensor)
"""
_LINE = 'key = key.replace(".ffn.gate.bias", ".ffn.gate.e_score_correction_bias")'
_ELIF = """\
class Draft(nn.Module):
    def load_weights(self, weights):
        params_dict = dict(self.named_parameters())
        for name, loaded_weight in weights:
            if "attn_sink" in name:
                continue
            elif ".ffn.gate.bias" in name:
                name = name.replace(".ffn.gate.bias", ".ffn.gate.e_score_correction_bias")
            params_dict[name].copy_(loaded_weight)
"""
_HELPER = """\
_BIAS = ".ffn.gate.bias"

class Draft(nn.Module):
    def load_weights(self, weights):
        params_dict = dict(self.named_parameters())
        for name, loaded_weight in weights:
            name = self._renamed(name)
            params_dict[name].copy_(loaded_weight)

    def _renamed(self, name):
        if name.endswith(_BIAS):
            return name.replace(_BIAS, ".ffn.gate.e_score_correction_bias")
        return name
"""
_GENERATED = """\
class Draft(nn.Module):
    def load_weights(self, weights):
        weights = [
            (name.replace(".ffn.gate.bias", ".ffn.gate.e_score_correction_bias"), loaded_weight)
            for name, loaded_weight in weights
        ]
        return AutoWeightsLoader(self).load_weights(weights)
"""
_SKIPPED = _GUARDED.replace(
    _GUARD, f"if name not in params_dict:\n                continue\n            {_GUARD}"
)

_SHARED = (
    Case(ABSENT, _GUARDED.replace("load_weights", "load_tensors")),
    Case(ABSENT, _GUARDED.replace(".ffn.gate.bias", ".ffn.norm_gate.bias")),
    Case(ABSENT, _GUARDED.replace("class Draft(nn.Module):", "if True:\n  class Draft:")),
    Case(ABSENT, _SHORT.replace(".ffn.gate.bias", ".ffn.norm_gate.bias")),
    Case(ABSENT, _SHORT.replace('".bias"', '".gate"')),
    Case(ABSENT, _SHORT.replace(_GUARD, "if True:")),
    Case(TWICE, _GUARDED + "\n\n" + _ALWAYS.replace("Draft", "Other")),
    Case(TWICE, _SHORT + "\n\n" + _ALWAYS.replace("Draft", "Other")),
)


def _remap_cases(anchor_id: str) -> tuple[Case, ...]:
    return (
        Case(APPLIES, _GUARDED, before=_GUARD),
        Case(
            APPLIES,
            _GUARDED.replace("name", "tensor_name").replace("tensor_named", "named"),
            before=_GUARD.replace("name", "tensor_name"),
        ),
        Case(APPLIES, "\n# header\n\nimport torch\n\n\n" + _GUARDED, before=_GUARD),
        Case(APPLIES, _GUARDED.replace(_GUARD, _LOOSE), before=_LOOSE),
        Case(APPLIES, _ALWAYS, before=_LINE),
        Case(APPLIES, _SHORT, before=_GUARD),
        Case(APPLIES, _ELIF, before='if "attn_sink" in name:'),
        Case(APPLIES, _HELPER, before="if name.endswith(_BIAS):"),
        Case(ABSENT, _GENERATED),
        Case(ABSENT, _SKIPPED),
        *_SHARED,
        Case(MIXED, _GUARDED + f"# >>> vision-exp:{anchor_id}\n"),
    )


def _hook_cases(anchor_id: str) -> tuple[Case, ...]:
    return (
        Case(APPLIES, _GUARDED),
        Case(APPLIES, _ALWAYS),
        Case(APPLIES, _SHORT),
        *_SHARED,
        Case(MIXED, _GUARDED + f"# <<< vision-exp:{anchor_id}\n"),
    )


def _find_hook(module: cst.Module) -> Match:
    return Match(names=(("guarded", rename.find(module).owner.name),))


def _render_hook(site: str, match: Match, values: Values) -> str:
    return hook.render(site, dict(match.names)["guarded"], values)


def _sites(site: str, order: int, folder: str = "nvidia", of: str = "") -> tuple[Anchor, Anchor]:
    path = f"models/deepseek_v4/{folder}/{site}.py"
    return (
        Anchor(
            id=f"{of}{site}-bias-vl",
            file=path,
            where="load_weights, in front of the rename of .ffn.gate.bias",
            what="rename of .ffn.gate.bias_vl to the routing bias of image rows",
            why=(
                "Draft layers carry bias_vl too and the stock loader knows no such name. The edit "
                "holds for a guarded and for an unconditional rename, never renames twice, and a "
                "name without a parameter stays a KeyError, also in loaders that skip such names."
            ),
            until="vLLM 0.30.0, whose draft loaders know the name",
            upstream="vllm-project/vllm pull request 54566",
            find=rename.locate,
            render=rename.render,
            cases=_remap_cases(f"{of}{site}-bias-vl"),
            optional=True,
            order=order,
        ),
        Anchor(
            id=f"{of}{site}-hook",
            file=path,
            where="end of the file, after the draft's classes",
            what="hook that lets the draft of a vision checkpoint route image rows",
            why=(
                "When the model hook runs, this module is only partly initialised, so the draft's "
                "classes are wrapped from their own file."
            ),
            until="vLLM 0.30.0, whose drafts route image rows themselves",
            upstream="vllm-project/vllm pull request 54566",
            find=_find_hook,
            render=partial(_render_hook, site),
            cases=_hook_cases(f"{of}{site}-hook"),
            optional=True,
            order=order,
        ),
    )


ANCHORS = (
    *_sites("dspark", order=30),
    *_sites("mtp", order=40),
    *_sites("dspark", order=70, folder="amd", of="amd-"),
    *_sites("mtp", order=80, folder="amd", of="amd-"),
)
