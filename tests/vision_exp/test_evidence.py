"""The evidence line: what it names, and how often a process says it."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from vision_exp import evidence, install

CONFIG = SimpleNamespace(hf_config=SimpleNamespace(rms_norm_eps=1e-6))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = ModuleType("vllm")
    vllm.__version__ = "0.29.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    on_platform(monkeypatch, rocm=False)
    monkeypatch.setattr(evidence, "_logged", set())
    monkeypatch.setattr(install, "installed", install.Installed(plan="p" * 64, overlay="o" * 64))


def on_platform(monkeypatch: pytest.MonkeyPatch, *, rocm: bool) -> None:
    platforms = ModuleType("vllm.platforms")
    current = SimpleNamespace(is_rocm=lambda: rocm)
    platforms.current_platform = current  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)


def said(caplog: pytest.LogCaptureFixture, *builds: str) -> list[str]:
    """What each build in turn adds to the log: its role, or nothing."""
    caplog.clear()
    with caplog.at_level("INFO", "vllm.vision_exp"):
        for one in builds:
            active = {"routing": "bias_vl", "visibility": "bidirectional"} if one == "model" else {}
            evidence.log_once(one, CONFIG, **active)
    return [line.split("role=")[1].split()[0].split("/")[1] for line in caplog.messages]


def test_what_it_names() -> None:
    line = evidence.line("model", CONFIG, "bias_vl", "causal reason=x")
    assert line.endswith(
        "/model vllm=0.29.0 plan=pppppppp overlay=oooooooo routing=bias_vl "
        "visibility=causal reason=x eps=1e-06"
    )
    assert line.startswith(f"[vision-exp] active pid={os.getpid()} role=")


def test_rocm_is_named_with_what_was_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    on_platform(monkeypatch, rocm=True)
    line = evidence.line("model", CONFIG, "bias_vl", "bidirectional")
    assert line.endswith(" eps=1e-06 platform=rocm (not run on AMD hardware)")


@pytest.mark.parametrize(
    ("builds", "lines"),
    [
        (("processor", "processor"), ["processor"]),
        (("model", "model"), ["model"]),
        (("processor", "model", "processor", "model"), ["processor", "model"]),
        (("model", "processor"), ["model"]),
    ],
)
def test_once_in_a_process(
    builds: tuple[str, ...], lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert said(caplog, *builds) == lines


def test_a_fork_says_it_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert said(caplog, "model") == ["model"]
    monkeypatch.setattr(os, "getpid", lambda: 7)
    assert said(caplog, "model") == ["model"]
