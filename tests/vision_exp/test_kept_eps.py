"""A kept rms_norm_eps, and a kernel that takes some values only: the installed b12x says which."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import wheel_files

from vision_exp.config import VisionConfigError
from vision_exp.install import prepare_config

SOURCE = "b12x/norm/mhc/_impl.py"


@pytest.mark.parametrize(
    ("fused", "installed", "given", "refused"),
    [
        ("1", None, 1e-20, True),
        ("1", "one value", 1e-20, True),
        ("1", "says nothing", 1e-20, True),
        ("1", "without the file", 1e-20, True),
        ("1", "1.5.1", 1e-20, False),
        ("1", "1.5.1", 1e-5, False),
        ("1", "1.5.1", 1e-12, True),
        ("1", None, 1e-6, False),
        ("0", None, 1e-20, False),
        ("", None, 1e-20, False),
    ],
)
@pytest.mark.parametrize("keep", ["keep", ""])
def test_a_kept_eps_that_the_kernel_does_not_take_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    keep: str,
    fused: str,
    installed: str | None,
    given: float,
    refused: bool,
) -> None:
    site = tmp_path
    if installed == "1.5.1":
        site = wheel_files.fetched("b12x", "1.5.1", lambda member: member == SOURCE)
    elif installed is not None:
        file = site / SOURCE
        file.parent.mkdir(parents=True)
        if installed != "without the file":
            said = "MHC_SUPPORTED_RMS_EPS = (1.0e-6,)\n" if installed == "one value" else "x = 1\n"
            file.write_text(said)
    monkeypatch.delitem(sys.modules, "b12x", raising=False)
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
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
