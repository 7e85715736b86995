"""A kept rms_norm_eps, and a kernel that takes 1e-6 only."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace

import pytest

from vision_exp.config import VisionConfigError
from vision_exp.install import prepare_config


@pytest.mark.parametrize(
    ("fused", "release", "given", "refused"),
    [
        ("1", None, 1e-20, True),
        ("1", "1.4.9", 1e-20, True),
        ("1", "1.5.1+cu130", 1e-20, False),
        ("1", None, 1e-6, False),
        ("0", None, 1e-20, False),
        ("", None, 1e-20, False),
    ],
)
@pytest.mark.parametrize("keep", ["keep", ""])
def test_a_kept_eps_that_the_kernel_does_not_take_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    keep: str,
    fused: str,
    release: str | None,
    given: float,
    refused: bool,
) -> None:
    def version(name: str) -> str:
        if release is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return release

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setenv("VISION_EXP_RMS_NORM_EPS", keep)
    monkeypatch.setenv("VLLM_USE_B12X_MHC", fused)
    config = SimpleNamespace(rms_norm_eps=given)
    if keep and refused:
        ways = "Unset VISION_EXP_RMS_NORM_EPS, .*; or unset VLLM_USE_B12X_MHC"
        with pytest.raises(VisionConfigError, match=ways):
            prepare_config(config)
    else:
        prepare_config(config)
        assert config.rms_norm_eps == (given if keep else 1e-6)
