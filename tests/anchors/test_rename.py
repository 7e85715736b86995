"""What is not the one rename of a draft loader is refused (test_draft_loaders.py runs them)."""

from __future__ import annotations

import pytest

from anchors.engine import cases
from anchors.kit.anchor import ABSENT, TWICE
from anchors.sites import all_anchors

REMAP = next(anchor for anchor in all_anchors() if anchor.id == "mtp-bias-vl")
FUNCTION = """\
if True:
    def load_weights(self, weights):
        name = name.replace(".ffn.gate.bias", ".ffn.gate.e_score_correction_bias")
"""
NESTED = """\
def make():
    class Draft:
        def load_weights(self, weights):
            name = name.replace(".ffn.gate.bias", ".ffn.gate.e_score_correction_bias")
"""
LOADER = """\
class Draft:
    def load_weights(self, weights):
        for name, weight in weights:
            name = name.replace(".ffn.gate.bias", ".ffn.gate.e_score_correction_bias")
"""


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        (NESTED, ABSENT),
        (FUNCTION, ABSENT),
        (LOADER.replace("load_weights", "remap"), ABSENT),
        (LOADER.replace(".e_score_correction_bias", ".bias_of_experts"), ABSENT),
        (LOADER.replace("name.replace(", "str(name).replace("), ABSENT),
        (LOADER.replace("= name", "= known[name]"), ABSENT),
        (LOADER + LOADER.replace("Draft", "Other"), TWICE),
        (LOADER + LOADER.partition("\n")[2].partition("\n")[2], TWICE),
    ],
)
def test_what_is_not_the_one_rename_is_refused(source: str, outcome: str) -> None:
    assert cases.run(REMAP, source) == (outcome, source)
