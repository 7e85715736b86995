"""Which kernel the tower's SwiGLU gets; bench/gpu_tower.py compares what QuACK computes on a GPU.

The card and QuACK are stood for here: only faults and the choice are looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from vision_exp import settings
from vision_exp.tower import backends, hopper
from vision_exp.tower.hopper import swiglu

CARD = torch.device("cuda", 0)
CPU = torch.device("cpu")


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x.double(), weight.double()).chunk(2, dim=-1)
    return (F.silu(gate) * up).bfloat16()


def other_order(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What a product makes that takes gate and up rows interleaved, as older ones do."""
    gate, up = F.linear(x.double(), weight.double()).unflatten(-1, (-1, 2)).unbind(-1)
    return (F.silu(gate) * up).bfloat16()


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(swiglu, "trial", on_cpu(swiglu.trial))
    forget()
    yield monkeypatch
    forget()


def forget() -> None:
    """What is known of the card, and of QuACK on it."""
    hopper.available.cache_clear()
    swiglu._tried.cache_clear()


def gated_linear(device: torch.device) -> Any:
    return backends.select(device).gated_linear


def on_cpu(trial: Any) -> Any:
    return lambda product, _device: trial(product, CPU)


def quack(product: Any) -> ModuleType:
    """QuACK with another product behind its name."""

    def gemm_gated(
        x: torch.Tensor, weight: torch.Tensor, *, postact_out: Any, **given: Any
    ) -> None:
        assert given == {
            "activation": "swiglu",
            "store_preact": False,
            "tuned": False,
            "concat_layout": ("B",),
        }
        postact_out.copy_(product(x, weight.t()))

    module = ModuleType("quack.gemm_interface")
    module.gemm_gated = gemm_gated  # type: ignore[attr-defined]
    return module


def test_a_product_that_is_right_is_used(on_hopper: pytest.MonkeyPatch) -> None:
    on_hopper.setitem(sys.modules, "quack", ModuleType("quack"))
    on_hopper.setitem(sys.modules, "quack.gemm_interface", quack(exact))
    product = gated_linear(CARD)
    assert product is not None
    x, weight = torch.randn(5, 16).bfloat16(), torch.randn(12, 16).bfloat16()
    assert torch.equal(product(x, weight), exact(x, weight))


@pytest.mark.parametrize("wrong", [other_order, lambda x, weight: exact(x, weight) * float("nan")])
def test_a_product_that_is_wrong_is_not(
    on_hopper: pytest.MonkeyPatch, wrong: Any, caplog: pytest.LogCaptureFixture
) -> None:
    on_hopper.setitem(sys.modules, "quack", ModuleType("quack"))
    on_hopper.setitem(sys.modules, "quack.gemm_interface", quack(wrong))
    assert gated_linear(CARD) is None
    assert "[vision-exp] the tower runs without QuACK: its trial is off by" in caplog.text


def test_without_quack_the_kernel_of_its_own_stays(
    on_hopper: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_hopper.setitem(sys.modules, "quack", None)
    assert gated_linear(CARD) is None
    assert "[vision-exp] the tower runs without QuACK: ModuleNotFoundError" in caplog.text


def test_a_quack_that_knows_other_parameters_is_not_used(
    on_hopper: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    older = ModuleType("quack.gemm_interface")
    older.gemm_gated = lambda x, weight, activation: None  # type: ignore[attr-defined]
    on_hopper.setitem(sys.modules, "quack", ModuleType("quack"))
    on_hopper.setitem(sys.modules, "quack.gemm_interface", older)
    assert gated_linear(CARD) is None
    assert "without QuACK: TypeError" in caplog.text


def test_other_cards_and_the_switch_do_not_even_import_it(on_hopper: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("QuACK was asked for")

    on_hopper.setattr(swiglu, "_quack", refuse)
    assert gated_linear(CPU) is None
    on_hopper.setenv(settings.TOWER_QUACK.name, "0")
    assert gated_linear(CARD) is None
    on_hopper.delenv(settings.TOWER_QUACK.name)
    on_hopper.setattr(torch.cuda, "get_device_capability", lambda _device: (12, 1))
    forget()
    assert gated_linear(CARD) is None
