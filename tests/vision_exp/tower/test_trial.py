"""The kind of attention is chosen by trying it: right first, then fast. The clock is stood for."""

from __future__ import annotations

import ast
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_rig
import wheel_files
from torch.nn.attention import varlen

from vision_exp.tower import attention, trial
from vision_exp.tower.attention import TORCH, Attend, Kind

CPU = torch.device("cpu")
FA_UTILS = "vllm.v1.attention.backends.fa_utils"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "SIZES", ((90, 71), (200, 183)))


def stage(times: dict[str, float]) -> trial.Stage:
    """Milliseconds by the name of the kind that runs, which `named` leaves behind."""

    def run(work: Callable[[], None]) -> trial.Replay:
        work()
        return work

    return trial.Stage(2, 64, CPU, run, lambda replay: (replay(), times[running[-1]])[1])


running: list[str] = []


def named(name: str, kind: Kind = TORCH) -> Kind:
    """Another attention of the same results, which says when it runs."""

    def image(rows: int, heads: int, device: torch.device) -> attention.ImageAttention:
        of = kind.image(rows, heads, device)

        def attend_of(keys: torch.Tensor) -> Attend:
            attend = of(keys)
            return lambda qkv: (running.append(name), attend(qkv))[1]

        return attend_of

    return Kind(name, kind.packed, image)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"a": 2.0, "b": 1.0, "c": 3.0}, "b"),
        ({"a": 2.0, "b": 1.95, "c": 3.0}, "a"),  # too little to change for
        ({"a": 2.0, "b": 1.8, "c": 1.6}, "c"),
    ],
)
def test_the_fastest_is_chosen(
    times: dict[str, float], expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.vision_exp")
    found = trial.choose([named(name) for name in times], stage(times))
    assert found is not None and found.name == expected
    (line,) = caplog.messages
    assert line.startswith(f"[vision-exp] tower attention: {expected} (microseconds for 71 and 183")
    assert f"a {1e3 * times['a'] / trial.CALLS:.0f} and " in line


def all_keys(rows: int, heads: int, device: torch.device) -> attention.ImageAttention:
    """Takes what lies behind the image for keys of it."""
    return lambda keys: lambda qkv: attention.torch_packed(qkv, [len(qkv)])


def one_image(qkv: torch.Tensor, seqlens: Any) -> torch.Tensor:
    return attention.torch_packed(qkv, [len(qkv)])


def not_a_number(qkv: torch.Tensor, seqlens: Any) -> torch.Tensor:
    return attention.torch_packed(qkv, seqlens) * torch.nan


def unknown(*_: Any) -> Any:
    raise TypeError("flash_attn_varlen_func() got an unexpected keyword argument 'num_splits'\nat")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"image": all_keys}, "WrongAttentionError: an image: off by "),
        ({"packed": one_image}, "WrongAttentionError: packed images: off by "),
        ({"packed": not_a_number}, "WrongAttentionError: packed images: off by nan"),
        ({"packed": unknown}, "TypeError: flash_attn_varlen_func() got an unexpected keyword"),
        ({"image": unknown}, "TypeError: flash_attn_varlen_func() got an unexpected keyword"),
    ],
)
def test_what_is_wrong_or_raises_is_left_out_with_its_reason(
    fault: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.vision_exp")
    broken = replace(named("FlashAttention 4"), **fault)
    found = trial.choose([broken, named("torch")], stage({"torch": 1.0}))
    assert found is not None and found.name == "torch"
    assert f"FlashAttention 4 left out ({reason}" in caplog.messages[0]
    assert trial.choose([broken], stage({})) is None
    assert caplog.messages[1].startswith(
        "[vision-exp] tower attention: torch without graphs, since nothing that was tried is right"
    )
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert all("\n" not in line for line in caplog.messages)


@pytest.mark.usefixtures("small")
def test_a_capture_that_fails_leaves_the_kind_out(caplog: pytest.LogCaptureFixture) -> None:
    def fails(_work: Callable[[], None]) -> trial.Replay:
        raise RuntimeError("operation not permitted when stream is capturing")

    caplog.set_level(logging.INFO, "vllm.vision_exp")
    assert trial.choose([TORCH], replace(stage({}), capture=fails)) is None
    assert "torch left out (RuntimeError: operation not permitted" in caplog.messages[0]


# --- what vLLM and torch are asked ----------------------------------------------------------------


NONE = attention.Flash()


@pytest.fixture
def fa_utils(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes a vLLM with these versions of FlashAttention, and this one in its config."""

    def make(best: int | None, supported: tuple[int, ...], asked: int | None = None) -> None:
        utils, config = ModuleType(FA_UTILS), ModuleType("vllm.config")
        vars(utils).update(
            flash_attn_varlen_func=unknown,
            get_flash_attn_version=lambda: asked or best,
            is_fa_version_supported=supported.__contains__,
        )
        wanted = SimpleNamespace(attention_config=SimpleNamespace(flash_attn_version=asked))
        vars(config).update(get_current_vllm_config_or_none=lambda: wanted)
        for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        for module in (utils, config):
            monkeypatch.setitem(sys.modules, module.__name__, module)

    return make


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((3, (2, 3, 4)), attention.Flash((3, 2))),
        ((3, (3,)), attention.Flash((3,))),
        ((4, (2, 4)), attention.Flash((4, 2))),
        ((2, (2,)), attention.Flash((2,))),
        ((None, ()), attention.Flash()),
        ((3, (2, 3), 2), attention.Flash((2,), asked=True)),
    ],
)
def test_vllm_says_which_versions_there_are(
    fa_utils: Callable[..., None], given: Any, expected: attention.Flash
) -> None:
    fa_utils(*given)
    assert attention.available_flash() == expected


@pytest.mark.parametrize(("found", "expected"), [(True, attention.Flash((0,))), (False, NONE)])
def test_rocms_flash_attention_has_no_version(
    fa_utils: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    found: bool,
    expected: attention.Flash,
) -> None:
    fa_utils(None, ())
    utils = sys.modules[FA_UTILS]
    utils.is_flash_attn_varlen_func_available = lambda: found  # type: ignore[attr-defined]
    assert attention.available_flash() == NONE, "not ROCm"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert attention.available_flash() == expected

    def attend(q: Any, k: Any, v: Any, **given: Any) -> torch.Tensor:
        assert given.keys().isdisjoint({"fa_version", "num_splits"})
        parts = zip(given["cu_seqlens_q"].diff(), given["cu_seqlens_k"].diff(), strict=True)
        return by_lengths(q, k, v, parts)

    monkeypatch.setattr(utils, "flash_attn_varlen_func", attend)
    kind = attention.flash_kind(attention.ROCM)
    assert kind.name == "FlashAttention of ROCm"
    assert trial.attempt(named("b", kind), stage({"b": 1.0}), 90, 71) > 0


def test_a_vllm_that_has_none_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert attention.available_flash() == attention.Flash()


def test_torchs_flash_attention_takes_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    real = inspect.signature(varlen.varlen_attn)

    def attend(*given: Any, **options: Any) -> torch.Tensor:
        bound = real.bind(*given, **options).arguments
        assert bound["cu_seq_q"].dtype == bound["cu_seq_k"].dtype == torch.int32
        assert bound["max_q"] == int(bound["cu_seq_q"].diff().max())
        parts = zip(bound["cu_seq_q"].diff(), bound["cu_seq_k"].diff(), strict=True)
        return by_lengths(bound["query"], bound["key"], bound["value"], parts)

    monkeypatch.setattr(varlen, "varlen_attn", attend)
    assert trial.attempt(named("b", attention.VARLEN), stage({"b": 1.0}), 90, 71) > 0


def by_lengths(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, parts: Any) -> torch.Tensor:
    out, at = torch.empty_like(q), 0
    for queries, keys in parts:
        rows = slice(at, at + int(queries))
        part = (
            rows_of.transpose(0, 1)[None]
            for rows_of in (q[rows], k[at : at + int(keys)], v[at : at + int(keys)])
        )
        out[rows] = torch.nn.functional.scaled_dot_product_attention(*part)[0].transpose(0, 1)
        at += int(queries)
    return out


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch, version: int) -> Iterator[list[dict[str, Any]]]:
    calls: list[dict[str, Any]] = []
    utils = ModuleType(FA_UTILS)

    def attend(**given: Any) -> torch.Tensor:
        calls.append(given)
        assert given["fa_version"] == version
        assert (given["causal"], given["num_splits"]) == (False, 1)
        parts = zip(given["cu_seqlens_q"].diff(), given["cu_seqlens_k"].diff(), strict=True)
        return by_lengths(given["q"], given["k"], given["v"], parts)

    vars(utils).update(flash_attn_varlen_func=attend)
    with monkeypatch.context() as patched:
        for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
            patched.setitem(sys.modules, name, ModuleType(name))
        patched.setitem(sys.modules, FA_UTILS, utils)
        yield calls


@pytest.mark.parametrize("version", [2, 3, 4])
@pytest.mark.parametrize("release", vllm_rig.RELEASES)
def test_vllms_flash_attention_takes_what_it_is_given(
    monkeypatch: pytest.MonkeyPatch, version: int, release: str
) -> None:
    kind = named("flash", attention.flash_kind(version))
    with recorded(monkeypatch, version) as calls:
        assert trial.attempt(kind, stage({"flash": 1.0}), 90, 71) > 0
    assert len(calls) > 2
    interface = vllm_rig.tree(release) / "vllm/vllm_flash_attn/flash_attn_interface.py"
    known = parameters(interface.read_text(), "flash_attn_varlen_func")
    assert set().union(*calls) <= known


@pytest.mark.parametrize("release", [vllm_rig.RELEASES[0], vllm_rig.RELEASES[-1]])
def test_flash_attention_4_takes_what_vllm_gives_it(release: str) -> None:
    """Both ends are in the CUDA wheel; the CPU wheel lacks the inner one."""
    name = "vllm/vllm_flash_attn/{}".format
    inner, outer = name("cute/interface.py"), name("flash_attn_interface.py")
    folder = wheel_files.fetched("vllm", release, (inner, outer).__contains__)
    given = [
        {keyword.arg for keyword in call.keywords if keyword.arg}
        for call in ast.walk(ast.parse((folder / outer).read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "_flash_attn_fwd"
    ]
    assert given and all(given)
    known = parameters((folder / inner).read_text(), "_flash_attn_fwd")
    assert set().union(*given) <= known
    assert {"cu_seqlens_q", "cu_seqlens_k", "num_splits", "causal"} <= given[0]


def parameters(source: str, name: str) -> set[str]:
    (found,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    given = found.args
    return {one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
