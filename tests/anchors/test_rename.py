"""The edit in front of the drafts' rename, in loaders of many shapes, told by running them."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anchors.engine import cases
from anchors.kit.anchor import ABSENT, APPLIES, TWICE
from anchors.sites import all_anchors

REMAP = next(anchor for anchor in all_anchors() if anchor.id == "mtp-bias-vl")
GATE = "layers.3.ffn.gate."
HOME = GATE + "e_score_correction_bias"

CALLS = (
    '{n}.replace(".ffn.gate.bias", ".ffn.gate.e_score_correction_bias")',
    '{n}.replace(\n    ".ffn.gate.bias",\n    ".ffn.gate.e_score_correction_bias",\n)',
    '{n}.replace(".ffn." "gate.bias", ".ffn.gate." "e_score_correction_bias")',
    '{n}.replace(".ffn.gate.bias", ".ffn.gate.e_score_correction_bias", 1)',
)
#: Around the rename `{r}`: bare, guarded in several ways, beside other work, in an `elif`.
SHAPES = (
    "{r}",
    'if {n}.endswith(".ffn.gate.bias"):\n    {r}',
    'if ".ffn.gate.bias" in {n}:\n    seen.append({n})\n    {r}',
    'if {n}.split(".")[-2:] == ["gate", "bias"]:\n    {r}',
    'if ".ffn." in {n}:\n    seen.append({n})\n    {r}',
    'if "attn_sink" in {n}:\n    continue\nelif ".ffn.gate.bias" in {n}:\n    {r}',
    'if "sink" in {n}:\n    continue\nelif "odd" in {n}:\n    pass\nelif ".ffn.gate.bias" in {n}:\n'
    "    {r}\nelse:\n    pass",
    'if "layers" in {n}:\n    if {n}.endswith(".ffn.gate.bias"):\n        {r}',
)
PARAMETERS = (
    ("{p} = dict(self.named_parameters())", True),
    ("{p} = dict(self.named_parameters())\nbuffers = dict(self.named_buffers())", True),
    ("{p} = self.known", False),
    ("{p} = dict(self.named_parameters())\nother = dict(self.named_parameters())", False),
)


@dataclass(frozen=True)
class Loader:
    """A draft's class: its source, and whether a name without a parameter can be told."""

    source: str
    tells: bool
    name: str


@st.composite
def loaders(draw: Any) -> Loader:
    name = draw(st.sampled_from(("name", "key", "weight_name")))
    known = draw(st.sampled_from(("params_dict", "mine")))
    first, tells = draw(st.sampled_from(PARAMETERS))
    call = draw(st.sampled_from(CALLS)).format(n=name)
    rename = f"{name} = {call}"
    if draw(st.booleans()):
        rename = f"# the stock loader's own words\n\n{rename}"
    shape = draw(st.sampled_from(SHAPES))
    column = next(line for line in shape.splitlines() if "{r}" in line).index("{r}")
    body = shape.replace("{r}", rename.replace("\n", "\n" + " " * column)).format(n=name)
    skip = draw(st.sampled_from(("", f"if {name} not in {known}:\n    continue\n")))
    loop = f"{body}\n{skip}{known}[{name}] = weight\nseen.append({name})"
    indent = draw(st.sampled_from(("  ", "    ", "\t")))
    text = (
        "class Draft:\n"
        "    def load_weights(self, weights):\n"
        f"{textwrap.indent('seen = []' + chr(10) + first.format(p=known), ' ' * 8)}\n"
        f"        for {name}, weight in weights:\n"
        f"{textwrap.indent(loop, ' ' * 12)}\n"
        "        return seen\n"
    )
    lines = [line.replace("    ", indent) for line in text.splitlines()]
    return Loader("\n".join(lines) + "\n", tells, name)


class Names(dict[str, int]):
    """A draft's parameters, by either way to ask for them."""

    def named_parameters(self) -> list[tuple[str, int]]:
        return list(self.items())

    named_buffers = named_parameters
    known = property(dict)


def load(source: str, parameters: list[str], given: str) -> list[str]:
    """The names under which one tensor is taken."""
    space: dict[str, Any] = {}
    exec(source, space)
    return space["Draft"].load_weights(Names.fromkeys(parameters, 0), [(given, 1)])


@settings(max_examples=60)
@given(loaders())
def test_a_loader_of_any_shape_takes_the_bias_of_images(loader: Loader) -> None:
    outcome, patched = cases.run(REMAP, loader.source)
    assert outcome == APPLIES, loader.source
    assert load(patched, [HOME + "_vl"], GATE + "bias_vl")[-1:] == [HOME + "_vl"], patched
    after = patched.partition("# <<< vision-exp:mtp-bias-vl\n")[2].split("\n")[0].strip()
    assert after.startswith(("if ", f"{loader.name} = ")), "in front of the statement's comments"
    # Once there, nothing is renamed again; all else is as it was.
    others = [GATE + "bias", GATE + "weight", HOME, HOME + "_vl", "layers.3.ffn.odd", "norm.weight"]
    known = [HOME, HOME + "_vl", GATE + "weight", "layers.3.ffn.odd", "norm.weight"]
    for other in others:
        assert load(patched, known, other) == load(loader.source, known, other), other
    if loader.tells:
        with pytest.raises(KeyError, match="bias_vl"):
            load(patched, [HOME], GATE + "bias_vl")
    else:  # which of the loader's dictionaries holds the parameters is not clear
        load(patched, [HOME], GATE + "bias_vl")


@pytest.mark.parametrize(
    "body",
    [
        'if name.endswith(".ffn.gate.bias"): name = {r}',
        'if ".ffn." in name:\n                mine = name\n                mine = {m}\n'
        "                name = mine",
    ],
    ids=["a guard on one line", "a name that is bound inside the if"],
)
def test_where_the_name_is_bound_and_the_statement_begins(body: str) -> None:
    call = CALLS[0].format(n="name")
    body = body.format(r=call, m=call.replace("name.", "mine."))
    source = (
        "class Draft:\n    def load_weights(self, weights):\n        seen = []\n"
        f"        for name, weight in weights:\n            {body}\n"
        "            seen.append(name)\n        return seen\n"
    )
    outcome, patched = cases.run(REMAP, source)
    assert outcome == APPLIES
    for name, taken in ((GATE + "bias_vl", HOME + "_vl"), (GATE + "bias", HOME), ("n", "n")):
        assert load(patched, [], name) == [taken], patched


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
