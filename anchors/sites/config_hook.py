"""The config hook: a vision checkpoint is recognised where its config is built."""

from __future__ import annotations

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
)

if TYPE_CHECKING:
    import libcst as cst

_CLASS = "DeepseekV4Config"


def _find(module: cst.Module) -> Match:
    exactly_one(f"top-level class {_CLASS}", len(classes(module, _CLASS)))
    return Match()


def _render(match: Match, values: Values) -> str:
    return hook.render("config", _CLASS, values)


_SOURCE = """\
from transformers import PretrainedConfig


class DeepseekV4Config(PretrainedConfig):
    model_type = "deepseek_v4"
"""

ANCHORS = (
    Anchor(
        id="config-hook",
        file="transformers_utils/configs/deepseek_v4.py",
        where="end of the file, after class DeepseekV4Config",
        what="hook that prepares this process once a config with a vision tower is built",
        why=(
            "Whether a checkpoint takes images is decided from its config, in every process and "
            "before the model registry is asked; the API process may never import the model."
        ),
        until="vLLM 0.30.0, whose DeepseekV4Config knows the vision fields itself",
        upstream="vllm-project/vllm pull request 54566",
        find=_find,
        render=_render,
        cases=(
            Case(APPLIES, _SOURCE),
            Case(APPLIES, _SOURCE.replace("(PretrainedConfig)", "(PretrainedConfig, Mixin)")),
            Case(APPLIES, _SOURCE + "\n\nDEFAULT = DeepseekV4Config"),
            Case(ABSENT, _SOURCE.replace("DeepseekV4Config", "DeepseekV41Config")),
            Case(ABSENT, "if True:\n    class DeepseekV4Config:\n        pass\n"),
            Case(TWICE, _SOURCE + "\n\nclass DeepseekV4Config(dict):\n    pass\n"),
            Case(MIXED, _SOURCE + "# >>> vision-exp:config-hook\n"),
            Case(MIXED, _SOURCE + "# <<< vision-exp:config-hook\n"),
        ),
        order=10,
    ),
)
