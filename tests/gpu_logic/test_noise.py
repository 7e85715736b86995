"""Where checks_noise finds that repeats part, without a GPU."""

from __future__ import annotations

import pytest
import torch
from gpu.jobs import checks_noise
from gpu.jobs.checks_noise import Call

STEPS = ("attn", "ffn.gate", "ffn.shared_experts", "ffn.experts", "ffn", "")


def run(**moved: float) -> list[Call]:
    """Two layers in order of completion; ``moved`` changes a row of 4 of one step of layer 0.

    Every step gets what the one before gave, so that a change goes on to the end.
    """
    value = torch.ones(4, 3)
    calls = [Call("embed_tokens", [torch.arange(4.0)], [value])]
    for layer in range(2):
        first = value
        for step in STEPS:
            given = value + 1
            if layer == 0 and step.replace(".", "_") in moved:
                given[2, 1] += moved[step.replace(".", "_")]
            got = first if step in ("ffn", "") else value
            calls.append(Call(f"layers.{layer}.{step}".rstrip("."), [got], [given]))
            value = given
    return calls


def test_experts_may_part() -> None:
    repeats = [run(), run(ffn_experts=0.5), run(), run(ffn_experts=-0.25)]
    parting = checks_noise.first_parting(repeats)
    assert parting == checks_noise.Parting("layers.0.ffn.experts", 0.25, 0.75, 2)
    good, words = checks_noise.assess(repeats)
    assert good
    assert "last layer's output differs by at most 0.75" in words


@pytest.mark.parametrize("step", ["attn", "ffn.gate", "ffn.shared_experts"])
def test_nothing_else_may_part(step: str) -> None:
    repeats = [run(), run(**{step.replace(".", "_"): 0.5})]
    parting = checks_noise.first_parting(repeats)
    assert parting is not None
    assert parting.name == f"layers.0.{step}"
    assert not checks_noise.assess(repeats)[0]


def test_equal_repeats_do_not_part() -> None:
    odd = run(attn=float("nan"))
    for repeats in ([run(), run(), run()], [odd, run(attn=float("nan"))]):
        assert checks_noise.first_parting(repeats) is None
        good, words = checks_noise.assess(repeats)
        assert good
        assert "nothing differs" in words


def test_a_module_that_got_other_inputs_did_not_part() -> None:
    one, two = torch.zeros(4, 3), torch.ones(4, 3)
    repeats = [[Call("layers.0.attn", [x], [x]), Call("layers.0", [x], [x])] for x in (one, two)]
    assert checks_noise.first_parting(repeats) is None
    good, words = checks_noise.assess(repeats)
    assert not good
    assert "its inputs differ too" in words
    later = [
        [*calls, Call("layers.1.ffn.experts", [one], [x])]
        for calls, x in zip(repeats, (one, two), strict=True)
    ]
    parting = checks_noise.first_parting(later)
    assert parting is not None
    assert parting.name == "layers.1.ffn.experts"


def test_negative_zero_nan_and_other_shapes_differ() -> None:
    zero = torch.zeros(2, 2)
    assert not checks_noise.same([[zero], [-zero]])
    assert checks_noise.spread([[zero], [-zero]]) == (1.0, 0.0)
    assert checks_noise.spread([[zero], [zero + float("nan")]]) == (1.0, float("inf"))
    assert not checks_noise.same([[zero], [zero[:1]]])
    assert checks_noise.spread([[zero], [zero[:1]]]) == (1.0, float("inf"))


def test_repeats_of_other_modules_are_not_compared() -> None:
    with pytest.raises(RuntimeError):
        checks_noise.first_parting([run(), run()[:-1]])


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = torch.nn.Identity()
        self.ffn = torch.nn.Module()
        self.ffn.gate = torch.nn.Identity()  # never called

    def forward(self, x: torch.Tensor, *, extra: object) -> tuple[torch.Tensor, None]:
        x += self.attn(x)  # in place: what it got must have been copied before
        return x, None


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])

    def forward(
        self, ids: object, positions: object, between: object, embeds: torch.Tensor
    ) -> None:
        for layer in self.layers:
            embeds, _ = layer(embeds, extra=[embeds.long()])


def test_what_fired_first_is_recorded_as_it_was() -> None:
    model = Model()
    with checks_noise.recorded(model) as calls:
        for _ in range(2):
            model(None, None, None, torch.ones(2, 3))
    names = ["inputs_embeds", "layers.0.attn", "layers.0", "layers.1.attn", "layers.1"]
    assert [call.name for call in calls] == names
    layer = calls[2]
    assert [float(x.max()) for x in layer.inputs] == [1, 1]
    assert [float(x.max()) for x in layer.outputs] == [2]
    model(None, None, None, torch.ones(2, 3))
    assert len(calls) == 5
