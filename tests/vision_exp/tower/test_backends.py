"""Which parts a GPU's tower gets, and how its attention is launched; GPU and vLLM are stood for."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from vision_exp.tower import attention, backends, hopper, split_kv
from vision_exp.tower.hopper import swiglu, waves

TOWER = Path(backends.__file__).parent
CARD = torch.device("cuda", 0)
META = torch.device("meta")
OURS = ["Triton 64x128", "Triton 128x64", "torch's FlashAttention", "torch"]
WAVES = "FlashAttention 3 in full waves"


@pytest.mark.parametrize(
    ("capability", "versions", "first"),
    [
        ((9, 0), (3, 2), [WAVES, "FlashAttention 2"]),
        ((9, 0), (2,), ["FlashAttention 2"]),
        ((9, 0), (), []),
        ((8, 0), (2,), ["FlashAttention 2"]),
        ((8, 0), (3,), ["FlashAttention 3"]),
        ((10, 0), (4, 2), ["FlashAttention 4", "FlashAttention 2"]),
        ((12, 1), (2,), ["FlashAttention 2"]),
        ((12, 1), (), []),
    ],
)
def test_what_a_gpu_gets(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    versions: tuple[int, ...],
    first: list[str],
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(swiglu, "select", lambda _device: "QuACK's product")
    hopper.available.cache_clear()
    kinds = backends.kinds(CARD, attention.Flash(versions))
    asked = backends.kinds(CARD, attention.Flash(versions[:1], asked=bool(versions)))
    found = backends.select(CARD, kinds[0])
    hopper.available.cache_clear()
    assert [kind.name for kind in kinds] == first + OURS
    assert [kind.name for kind in asked] == (first[:1] or OURS)
    assert found.attention is kinds[0]
    assert found.pdl == (capability[0] == 9)
    assert found.gated_linear == ("QuACK's product" if capability[0] == 9 else None)


def test_an_amd_card_is_no_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """gfx942 answers 9 for its major capability, and ROCm's torch calls its devices "cuda"."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 4))
    hopper.available.cache_clear()
    kinds = backends.kinds(CARD, attention.Flash((3, 2)))
    found = backends.select(CARD, kinds[0])
    hopper.available.cache_clear()
    assert kinds[0].name == "FlashAttention 3"
    assert (found.gated_linear, found.pdl) == (None, False)


def test_one_module_asks_for_the_generation() -> None:
    users = set()
    for path in TOWER.glob("*.py"):
        text = path.read_text()
        assert not [word for word in ("SM90", "sm_90", "capability") if word in text], path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                users |= {path.name for name in names if ".hopper" in name}
    assert users == {"backends.py"}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """What goes to which stream, on a card of 132 SMs with FlashAttention 3."""
    log: list[tuple[Any, ...]] = []
    current = ["main"]

    class Stream:
        def __init__(self, name: Any) -> None:
            self.name = name if isinstance(name, str) else "side"

        def wait_stream(self, other: Stream) -> None:
            log.append((self.name, "waits for", other.name))

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, current[0] = current[0], stream.name
        yield
        current[0] = before

    def attend(**given: Any) -> torch.Tensor:
        log.append((current[0], "flash", len(given["q"]), len(given["k"])))
        assert (given["max_seqlen_q"], given["fa_version"]) == (len(given["q"]), 3)
        assert given["num_splits"] == 1
        return given["out"]

    def plan(**given: Any) -> torch.Tensor:
        log.append((current[0], "plan", given["max_seqlen_q"], given["max_seqlen_k"]))
        return torch.empty(1, device=META)

    def kernel(grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *given, **_: log.append((current[0], "tail", grid, given[6:8]))

    fa_utils = ModuleType("vllm.v1.attention.backends.fa_utils")
    vars(fa_utils).update(
        flash_attn_varlen_func=attend,
        get_scheduler_metadata=plan,
    )
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, fa_utils.__name__, fa_utils)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Stream(current[0]))
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: card)
    kernels = type("Kernels", (), {"__getitem__": lambda _self, grid: kernel(grid)})
    monkeypatch.setattr(split_kv, "_tail_rows_kernel", kernels())
    caches = (waves._side_stream, waves.attend_image)
    for cache in caches:
        cache.cache_clear()
    yield log
    for cache in caches:
        cache.cache_clear()


def blocks(attend: attention.Attend, rows: int, count: int) -> None:
    for _ in range(count):
        out = attend(torch.empty(rows, 3, 16, 64, device=META))
        assert out.shape == (rows, 16 * 64)


def test_tail_rows_run_beside_full_waves(launches: list[tuple[Any, ...]]) -> None:
    """One plan for all blocks; the tail waits for its inputs, and the next kernel for the tail."""
    keys = torch.empty(2, dtype=torch.int32, device=META)
    blocks(waves.attend_image(3108, 16, META)(keys), 3108, count=2)
    block = [
        ("side", "waits for", "main"),
        ("main", "flash", 3072, 3108),
        ("side", "tail", (1, 16, 1), (3072, 3108)),
        ("main", "waits for", "side"),
    ]
    assert launches == [("main", "plan", 3072, 3108), *block, *block]


def test_no_tail_where_one_call_is_as_good(launches: list[tuple[Any, ...]]) -> None:
    keys = torch.empty(2, dtype=torch.int32, device=META)
    blocks(waves.attend_image(784, 16, META)(keys), 784, count=2)
    block = ("main", "flash", 784, 784)
    assert launches == [("main", "plan", 784, 784), block, block]


@pytest.mark.parametrize(
    ("rows", "idle", "expected"),
    [(36, 8, 1), (240, 4, 4), (36, 0, 8), (512, 0, 2), (511, 200, 1)],
)
def test_keys_are_split_where_idle_sms_do_not_suffice(rows: int, idle: int, expected: int) -> None:
    assert split_kv.num_splits(rows, 16, num_sms=132, idle=idle) == expected


def test_torch_hides_the_keys_behind_an_image_exactly() -> None:
    """The same bits, whatever lies there: a graph's rows depend on the image alone."""
    qkv = torch.randn(90, 3, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    attend = attention.torch_image(90, 2, torch.device("cpu"))(torch.tensor([0, 71]))
    before = attend(qkv)[:71]
    qkv[71:] = 1e4
    assert torch.equal(attend(qkv)[:71], before)
    exact = attention.torch_packed(qkv[:71].double(), [71])
    assert (before.double() - exact).norm() < 4e-3 * exact.norm()
