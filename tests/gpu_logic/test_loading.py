"""Which tensors a model took while it was loaded, without vLLM."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.checkpoint import tiny_checkpoint
from gpu.lib import loading
from gpu.lib.loading import Load, assess_loading, watched_loading


class Model(torch.nn.Module):
    """Takes a, its half b, c by an index and d into a buffer; e is dropped without a word."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Parameter(torch.zeros(4, 2), requires_grad=False)
        self.two = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("table", torch.zeros(2))

    def load_weights(self, weights: Any) -> set[str]:
        for name, tensor in weights:
            if name in "ab":
                self.one.data[2 * "ab".index(name) :][:2].copy_(tensor)
            elif name == "c":
                self.two.data[1:] = tensor
            elif name == "d":
                self.table.fill_(tensor.item())
            torch.zeros(2).copy_(torch.ones(2))  # into nothing that the model holds
        return {"one", "two"}


class Loader:
    def load_weights(self, model: Model) -> set[str]:
        return model.load_weights(self.get_all_weights(model))

    def get_all_weights(self, _model: Model) -> Iterator[tuple[str, torch.Tensor]]:
        shapes = {"a": (2, 2), "b": (2, 2), "c": (2,), "d": (1,), "e": (2,)}
        for name, shape in shapes.items():
            yield name, torch.ones(shape)


def test_writes_are_told_by_the_tensor_that_was_handed_out() -> None:
    model = Model()
    with watched_loading(Loader) as loads:
        assert Loader().load_weights(model) == {"one", "two"}
    assert [load.model for load in loads] == ["Model"]
    assert loads[0].given == ["a", "b", "c", "d", "e"]
    assert loads[0].written == {"a", "b", "c", "d"}
    assert torch.equal(model.one, torch.ones(4, 2)) and torch.equal(model.table, torch.ones(2))
    assert Loader.load_weights.__name__ == "load_weights", "put back"
    Loader().load_weights(model)
    assert len(loads) == 1


def test_every_tensor_needs_a_home() -> None:
    names = {"a", "b", "mtp.0.a"}
    target, draft = (
        Load("T", ["a", "b", "mtp.0.a"], {"a", "b"}),
        Load("D", ["mtp.0.a"], {"mtp.0.a"}),
    )
    assert assess_loading(names, [target, draft], {})[0]
    assert assess_loading(names, [target], loading.DRAFTS)[0]
    good, words = assess_loading(names, [target], {})
    assert not good
    assert "without a home: mtp.0.a" in words
    assert not assess_loading(names | {"c"}, [target, draft], {})[0], "never handed out"
    assert not assess_loading(names, [target, draft], loading.DRAFTS)[0], "written after all"
    assert not assess_loading(names, [Load("T", ["a", "b"], {"a"})], loading.DRAFTS)[0]
    assert not assess_loading(set(), [], {})[0], "nothing was loaded"
    # Known to be homeless, but not even offered: the loader did not read the whole checkpoint.
    assert not assess_loading(names, [Load("T", ["a", "b"], {"a", "b"})], loading.DRAFTS)[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with the names of the real one."""
    narrow = {"experts": 8, "hidden_size": 128, "vision_dim": 128, "vision_inter_dim": 128}
    return tiny_checkpoint.write(tmp_path_factory.mktemp("checkpoint"), **narrow)


def test_the_confidence_head_that_a_draft_may_drop_is_in_the_checkpoint(folder: Path) -> None:
    (pattern,) = loading.unused_by_draft("")
    assert [name for name in loading.names_in(folder) if re.fullmatch(pattern, name)]


def test_only_hash_layers_have_a_bias_without_a_home(folder: Path) -> None:
    names = loading.names_in(folder)
    patterns = loading.hash_biases(folder)
    homeless = {name for name in names if any(re.fullmatch(each, name) for each in patterns)}
    biases = {name for name in names if name.endswith(".ffn.gate.bias")}
    assert homeless == {
        n for n in biases if n.split(".")[0] == "layers" and n.split(".")[1] in "012"
    }
    assert "layers.3.ffn.gate.bias" in biases - homeless
