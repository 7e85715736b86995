# ruff: noqa: E501 (the parts of a loader stand in one line each)
"""Draft loaders of many shapes.

A shape is put together from parts that public loaders have, and from such as go wrong.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

from hypothesis import strategies as st

from anchors.kit.draft_names import NEW, OLD

_CALL = f'N.replace("{OLD}", "{NEW}")'
_GUARD = f'if N.endswith("{OLD}"):\n    N = {_CALL}\n'

LOOPS = (
    "for N, w in weights:\n",
    "for N, w in list(weights):\n",
    "for item in weights:\n    N, w = item\n",
    "for item in weights:\n    N = item[0]\n    w = item[1]\n",
    "for index, (N, w) in enumerate(weights):\n",
)
EARLY = (  # in front of the rename
    "",
    'N = N.replace("mtp.0.", "model.layers.3.")\n',
    'if N.startswith("embed."):\n    continue\n',
    'if ".experts." in N:\n    P[N].load(w)\n    continue\n',
    'if N.endswith(".scale"):\n    N = N.removesuffix(".scale") + ".weight_scale"\n',
    "mapped = self._mapped(N)\nif mapped is None:\n    continue\nN = mapped\n",
    "N = inner(N)\n",
    'if N.startswith("mtp."):\n    N = re.sub("^mtp", "mtp", N)\n',
    'for part, whole, shard in [("gate_up", "w1", 0), ("fused", "wq", 1)]:\n'
    "    if part not in N:\n        continue\n    N = N.replace(part, whole)\n    break\n",
    'is_layer = N.startswith("mtp.")\nif not is_layer:\n    continue\n',
    'N = f"draft.{N}".removeprefix("draft.")\n',
    'if re.search(r"\\.experts\\.\\d+\\.", N):\n    continue\n',
    'if any(word in N for word in ("rotary_emb.inv_freq", "attn_sink")):\n    continue\n',
    'head, _, tail = N.rpartition(".")\nif tail in ("scale", "zero"):\n    continue\n',
    'try:\n    layer = int(N.split(".")[1])\nexcept ValueError:\n    layer = 0\n',
)
WRONG_EARLY = (
    "if N not in P:\n    continue\n",
    'if N.endswith("_vl"):\n    continue\n',
    'if N.rsplit(".", 1)[-1] not in ("weight", "bias", "scale"):\n    continue\n',
    'if not N.endswith((".weight", ".bias", ".scale")):\n    continue\n',
    'if "bias_" in N:\n    continue\n',
    'if re.fullmatch(r".*\\.(weight|bias|scale)", N) is None:\n    continue\n',
    "if not self._known(N):\n    continue\n",
    "if len(N) > 21:\n    continue\n",
    "if len(N) == 21:\n    continue\n",
    'if N[-3:] == "_vl":\n    continue\n',
    'try:\n    layer = int(N.split(".")[1])\nexcept ValueError:\n    N = N.removesuffix("_vl")\n',
    'for each in re.findall("_vl", N):\n    w = None\n',
    'if "0.ffn.gate.bias_vl" in N:\n    continue\n',
    'if N.endswith((".norm", "_vl")):\n    continue\n',
    'if not N.endswith("_vl"):\n    size = w\nw = size\n',
    "if len(N) > 21 and w is not None:\n    continue\n",
    'N = N if not N.endswith("_vl") else "x"\n',
    'if {"mtp.0.ffn.gate.bias_vl": True}.get(N):\n    continue\n',
    'is_bias = N.endswith(".bias")\nif not is_bias and ".gate." in N and "bias" in N:\n    continue\n',
    "kind = self.KINDS.get(N.split('.')[-1])\nif kind is None:\n    continue\n",
    'if N[-8:].count("_"):\n    continue\n',
    "N = N.replace('bias_vl', 'weight')\n",
)
RENAMES = (
    _GUARD,
    f'if "{OLD}" in N:\n    N = {_CALL}\n',
    f"N = {_CALL}\n",
    f'N = {_CALL} if N.endswith("{OLD}") else N\n',
    f'if "attn_sink" in N:\n    continue\nelif N.endswith("{OLD}"):\n    N = {_CALL}\n',
    f'if ".gate." in N:\n    if N.endswith("{OLD}"):\n        N = {_CALL}\n',
    f'if N.endswith(".bias") and ".ffn.gate" in N:\n    N = {_CALL}\n',
    f'if N.split(".")[-2:] == ["gate", "bias"]:\n    N = {_CALL}\n',
    "N = self._renamed(N)\n",
    "N = renamed(N)\n",
    f"while True:\n    {textwrap.indent(_GUARD, '    ')[4:]}    break\n",
    _GUARD.replace(f'"{OLD}"', "_OLD"),
    _GUARD.replace(f'"{OLD}"', "self.GATE"),
    f"K = {_CALL}\nN = K\n",
    f'if "norm" in N:\n    N = N.replace("norm", "n")\nelse:\n    {textwrap.indent(_GUARD, "    ")[4:]}',
    f'if N.endswith("{OLD}"):\n    old = N\n    N = {_CALL}\n',
)
WRONG_RENAMES = (
    f"N = (lambda M: M.replace('{OLD}', '{NEW}'))(N)\n",
    f"N = [M.replace('{OLD}', '{NEW}') for M in [N]][0]\n",
    f"if N.endswith('.bias'):\n    {textwrap.indent(_GUARD, '    ')[4:]}",
    f"if N.endswith('.bias'):\n    {textwrap.indent(_GUARD, '    ')[4:]}    seen.add(N)\n",
    f"match N.split('.'):\n    case [*_, 'gate', 'bias']:\n        N = {_CALL}\n",
    f"match w:\n    case _:\n        N = {_CALL}\n",
    "if N.endswith('.bias'):\n    N = renamed(N)\n",
    "N = closed()\n",
    f"if seen:\n    N = {_CALL}\n",
    f"K = {_CALL}\n",
    f"if K is not None:\n    K = K.replace('{OLD}', '{NEW}')\nK = N\n",
    f"seen.add({_CALL})\n",
    f"try:\n    {textwrap.indent(_GUARD, '    ')[4:]}except KeyError:\n    continue\n",
)
LATE = (
    "",
    'if ".rotary_emb." in N:\n    continue\n',
    "seen.add(N)\n",
    'if N.endswith(".bias") and N not in P:\n    continue\n',
    "if N not in P:\n    continue\n",
)
WRONG_LATE = (
    f'if N.endswith("{NEW}_vl"):\n    continue\n',
    'if N.endswith("e_score_correction_bias"):\n    P[N].load(w)\n    continue\nelif ".gate." in N:\n    continue\n',
    'if N.rsplit(".", 1)[-1] not in ("weight", "e_score_correction_bias"):\n    continue\n',
)
LOADS = (
    "P[N].load(w)\n",
    "parameter = P[N]\nload = getattr(parameter, 'load', None)\nload(w)\nseen.add(N)\n",
    "parameter = P.get(N)\nif parameter is None:\n    raise KeyError(N)\nparameter.load(w)\n",
    "self._load(P, N, w)\n",
    "try:\n    parameter = P[N]\nexcept KeyError:\n    continue\nparameter.load(w)\n",
)
WRONG_LOADS = ("kept[N] = w\n", "P[original].load(w)\n")
PLACES = ("before", "within", "after")

_MODULE = """\
import re

_OLD = "{old}"


class Module:
    def __init__(self, parameters):
        self._parameters = parameters

    def named_parameters(self):
        return list(self._parameters.items())


class Draft(Module):
    GATE = "{old}"
    KINDS = {{"weight": 1, "bias": 2, "scale": 3}}

    def _mapped(self, name):
        found = re.match(r"mtp\\.(\\d+)\\.(.*)", name)
        if found is None:
            return None
        return f"model.layers.{{3 + int(found.group(1))}}.{{found.group(2)}}"

    def _in_other_checkpoints(self, name):
        return name.replace("{old}", ".gate.bias")

    def _known(self, name):
        return name.split(".")[-1] in self.KINDS

    def _load(self, parameters, name, tensor):
        parameters[name].load(tensor)

{helper}
    def load_weights(self, weights):
        seen, kept, K = set(), {{}}, None

        def inner(name):
            for old, new in {{".emb.": ".embed_tokens.", ".head.": ".lm_head."}}.items():
                if old in name:
                    name = name.replace(old, new)
            return name

{nested}{body}        return seen
"""
HELPERS = (
    f'if name.endswith("{OLD}"):\n    name = name.replace("{OLD}", "{NEW}")\nreturn name\n',
    f'if name.endswith(_OLD):\n    return name.replace(_OLD, "{NEW}")\nreturn name\n',
    f'return name.replace("{OLD}", "{NEW}")\n',
)


@dataclass(frozen=True)
class Shape:
    """The parts of a loader; `name` is what its loop calls the weight."""

    loop: str
    early: tuple[str, ...]
    rename: str
    late: str
    load: str
    place: str
    helper: str
    loads_first: bool
    name: str

    @property
    def source(self) -> str:
        """The module."""
        last = (
            [self.load, self.rename, self.late]
            if self.loads_first
            else [self.rename, self.late, self.load]
        )
        steps = "original = N\n" + "".join((*self.early, *last))
        made = "P = dict(self.named_parameters())\n"
        head, *unpacking = self.loop.splitlines(keepends=True)
        inner = (
            textwrap.dedent("".join(unpacking)) + (made if self.place == "within" else "") + steps
        )
        body = (made if self.place == "before" else "") + head + textwrap.indent(inner, "    ")
        if self.place == "after":
            body += made
        if "kept[" in self.load:
            body += "for key, tensor in kept.items():\n    P[key].load(tensor)\n"
        helper = nested = ""
        if "_renamed(" in self.rename:
            helper = "    def _renamed(self, name):\n" + textwrap.indent(self.helper, " " * 8)
        elif "renamed(" in self.rename:
            nested = "def renamed(name):\n" + textwrap.indent(self.helper, "    ")
        elif "closed(" in self.rename:
            nested = f"def closed():\n    return {_CALL}\n"
        for old, new in (("N", self.name), ("P", "params_dict"), ("K", "key"), ("M", "each")):
            body = re.sub(rf"\b{old}\b", new, body)
            nested = re.sub(rf"\b{old}\b", new, nested)
        spaces = " " * 8
        return _MODULE.format(
            old=OLD,
            helper=helper,
            nested=textwrap.indent(nested, spaces),
            body=textwrap.indent(body, spaces),
        )


def _mostly(good: tuple[str, ...], wrong: tuple[str, ...]) -> st.SearchStrategy[str]:
    return st.integers(0, 5).flatmap(lambda roll: st.sampled_from(wrong if roll == 5 else good))


SHAPES = st.builds(
    Shape,
    loop=st.sampled_from(LOOPS),
    early=st.lists(_mostly(EARLY, WRONG_EARLY), max_size=3).map(tuple),
    rename=_mostly(RENAMES, WRONG_RENAMES),
    late=_mostly(LATE, WRONG_LATE),
    load=_mostly(LOADS, WRONG_LOADS),
    place=st.sampled_from(("before",) * 8 + PLACES),
    helper=st.sampled_from(HELPERS),
    loads_first=st.sampled_from((False,) * 9 + (True,)),
    name=st.sampled_from(("name", "weight_name", "key_")),
)
