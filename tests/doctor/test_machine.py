"""Doctor's table for a machine, from real vLLMs and the Python sources of real FlashInfers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import hotfix_rig
import pytest
import sources
import vllm_rig
import wheel_files

from anchors.doctor import environment, machine
from anchors.doctor.verdict import BROKEN, DEGRADED
from anchors.releases import flashinfer

#: Each FlashInfer that an official vLLM pins.
PINNED = {
    "0.25.1": "0.6.13",
    "0.26.0": "0.6.14",
    "0.27.1": "0.6.16",
    "0.28.0": "0.6.16",
    "0.29.0": "0.6.18",
}


def put_flashinfer(site: Path, version: str) -> None:
    def wanted(name: str) -> bool:
        return name.startswith("flashinfer/mla/") and name.endswith(".py")

    fetched = wheel_files.fetched("flashinfer-python", version, wanted)
    shutil.copytree(fetched, site, dirs_exist_ok=True)
    (site / f"flashinfer_python-{version}.dist-info").mkdir()


def site(tmp_path: Path, vllm: str, version: str) -> Path:
    """The vllm package of a release beside a FlashInfer."""
    root = sources.install(vllm, tmp_path / "site")
    if vllm in vllm_rig.RELEASES:  # the other trees hold what is patched alone
        for path in (machine.SWA, machine.ALIGNMENT):
            shutil.copy(vllm_rig.tree(vllm) / "vllm" / path, root / path)
    put_flashinfer(root.parent, version)
    return root


def table(capability: str, here: machine.Installed) -> dict[str, machine.Row]:
    return {row.part: row for row in machine.rows(capability, here)}


@pytest.mark.parametrize(
    ("version", "form", "wide", "narrow"),
    [
        ("0.6.13", "none", False, False),
        ("0.6.14", "pairs", True, False),
        ("0.6.16", "pairs", True, False),
        ("0.6.18", "pairs", True, True),
        ("0.7.0.post1", "rule", True, True),
        ("0.7.2.post1", "rule", True, True),
        ("0.7.4", "rule", True, True),
    ],
)
def test_flashinfers_kernels_are_read_in_each_of_their_forms(
    tmp_path: Path, version: str, form: str, wide: bool, narrow: bool
) -> None:
    put_flashinfer(tmp_path, version)
    found = flashinfer.installed(str(tmp_path))
    assert (found.version, found.form) == (version, form)
    assert found.takes(machine.HEADS, 512) is wide
    assert found.takes(machine.HEADS, 192) is found.takes(machine.HEADS, 256) is narrow


@pytest.mark.parametrize(
    "source",
    ["_DECODE_DSV4_DISPATCH = capability()", "_DECODE_DSV4_DISPATCH = frozenset(x)", "(", "a = 1"],
)
def test_a_table_of_another_form_is_unknown_and_no_verdict(tmp_path: Path, source: str) -> None:
    root = site(tmp_path, "0.29.0", "0.6.18")
    (root.parent / "flashinfer/mla/_sparse_mla_sm120.py").write_text(source)
    here = machine.read(str(root))
    assert here.flashinfer.form == "unknown"
    rows = table("12.1", here)
    assert rows["visibility"].what == rows["drafting"].what == "unknown"
    assert machine.findings("12.1", here, native=False) == []


@pytest.mark.parametrize("vllm", PINNED)
def test_of_the_official_releases_0_29_alone_drafts_on_a_spark(tmp_path: Path, vllm: str) -> None:
    here = machine.read(str(site(tmp_path, vllm, PINNED[vllm])))
    assert machine.draft_keys(here) == (256 if vllm < "0.28" else 192)
    rows = table("12.1", here)
    assert rows["attention"].what == "DeepseekV4FlashInferSM120Attention"
    assert rows["tower attention"].what.startswith("FlashAttention 2")
    assert (rows["drafting"].what == "DSpark") is (vllm == "0.29.0")
    assert (rows["visibility"].what == "bidirectional") is (vllm != "0.25.1")
    findings = machine.findings("12.1", here, native=False)
    assert all(finding.word == DEGRADED for finding in findings)
    assert len(findings) == (vllm != "0.29.0") + (vllm == "0.25.1")
    if vllm != "0.29.0":
        assert "use vLLM 0.29.0, install flashinfer-python 0.6.18" in findings[-1].next
    # Elsewhere these kernels are not used.
    assert machine.findings("9.0", here, native=False) == []
    assert table("9.0", here)["drafting"].what == "DSpark"


WIDE = frozenset((heads, machine.WINDOW + machine.IMAGE) for heads in machine.HEADS)
NARROW = frozenset((heads, machine.WINDOW) for heads in machine.HEADS)


@pytest.mark.parametrize(
    ("pairs", "swa", "capability", "what"),
    [
        (WIDE | NARROW, b"prefill_swa_indices", "12.1", "bidirectional"),
        (WIDE - {(32, 512)}, b"prefill_swa_indices", "12.1", "causal"),
        (NARROW, b"prefill_swa_indices", "12.1", "causal"),
        (NARROW, b"prefill_swa_indices", "9.0", "bidirectional"),
        (WIDE, b"", "9.0", "causal"),
        (WIDE, b"", "12.1", "causal"),
        (WIDE, None, "9.0", "unknown"),
    ],
)
def test_what_makes_images_visible(
    pairs: frozenset[tuple[int, int]], swa: bytes | None, capability: str, what: str
) -> None:
    here = machine.Installed(flashinfer.FlashInfer("0.6.16", "pairs", pairs), swa)
    assert table(capability, here)["visibility"].what == what
    told = [one.reason for one in machine.findings(capability, here, native=False)]
    assert any("image tokens are causal" in reason for reason in told) is (what == "causal")


@pytest.mark.parametrize(
    ("version", "form", "warned"),
    [
        ("0.6.18", "pairs", True),
        ("0.6.13", "none", True),
        ("", "none", False),
        ("1", "rule", False),
    ],
)
def test_a_native_vllm_is_warned_of_where_its_flashinfer_lacks_kernels(
    version: str, form: str, warned: bool
) -> None:
    here = machine.Installed(flashinfer.FlashInfer(version, form), None)
    assert bool(machine.of_native(here)) is warned
    assert len(machine.findings("12.0", here, native=True)) == warned
    assert machine.findings("9.0", here, native=True) == []


def test_no_row_of_an_unseen_machine_claims_a_run(tmp_path: Path) -> None:
    here = machine.read(str(site(tmp_path, "0.29.0", "0.6.18")))
    for capability in ("10.0", "12.0", "12.1"):
        for row in machine.rows(capability, here):
            assert "never run there" in row.why
    assert all("run on H200" in row.why for row in machine.rows("9.0", here))
    assert [row.what for row in machine.rows("8.0", here)] == ["unknown for this GPU"]


def test_a_forks_own_attention_makes_visibility_uncertain(tmp_path: Path) -> None:
    root = site(tmp_path, "0.29.0", "0.6.18")
    (root / "models/deepseek_v4/nvidia/b12x.py").touch()
    assert table("12.1", machine.read(str(root)))["visibility"].what == "bidirectional or causal"


@pytest.mark.parametrize(
    ("vllm", "version", "starts"), [("0.30.0", "0.6.18", False), ("0.31.0", "0.7.0.post1", True)]
)
def test_superseded_names_the_release_for_a_spark(
    tmp_path: Path, vllm: str, version: str, starts: bool
) -> None:
    root = site(tmp_path, vllm, version)
    findings = machine.findings("12.1", machine.read(str(root)), native=True)
    assert [finding.word for finding in findings] == ([] if starts else [BROKEN])
    assert machine.findings("9.0", machine.read(str(root)), native=True) == []
    for verb in ("apply", "status"):
        answer = hotfix_rig.call(["--root", str(root), "--json", verb], {"PATH": "/usr/bin:/bin"})
        assert answer.json["state"] == "superseded"
        named = [note for note in answer.json["notes"] if "use vLLM 0.31.0 or later" in note]
        assert len(named) == (0 if starts else 1)


def test_doctor_prints_the_table_of_the_gpu_it_is_on(tmp_path: Path) -> None:
    root = site(tmp_path, "0.27.1", "0.6.16")
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho NVIDIA GB10, 12.1\n")
    smi.chmod(0o755)
    environment = {"PATH": f"{smi.parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
    place = ["--root", str(root), "--overlay-root", str(tmp_path / "overlay")]
    assert hotfix_rig.call([*place, "apply"], environment).code == 0
    answer = hotfix_rig.call([*place, "--json", "doctor"], environment)
    told = {fact["fact"]: fact["value"] for fact in json.loads(answer.out)["doctor"]}
    assert told["machine"] == "NVIDIA GB10, SM121"
    assert told["drafting"].startswith("none: a server with it dies at start (FlashInfer 0.6.16 ")
    assert {"attention", "experts", "visibility", "tower attention"} <= set(told)
    assert answer.json["verdict"]["word"] == DEGRADED
    assert "no drafting with DSpark" in answer.json["verdict"]["reason"]


def test_the_installed_b12x_says_which_eps_its_kernel_takes(tmp_path: Path) -> None:
    name = "b12x/norm/mhc/_impl.py"
    fetched = wheel_files.fetched("b12x", "1.5.1", lambda member: member == name)
    assert environment.mhc_eps(str(fetched)) == "1e-20, 1e-06, 1e-05"
    root = sources.install("0.29.0", tmp_path / "site")
    asked = ["--root", str(root), "--json", "doctor"]
    settings = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "VLLM_USE_B12X_MHC": "1"}

    def told() -> str:
        facts = hotfix_rig.call(asked, settings).json["doctor"]
        return next(fact["value"] for fact in facts if fact["fact"] == "rms_norm_eps")

    assert "must be forced: VLLM_USE_B12X_MHC=1, and that kernel takes 1e-6 only" in told()
    shutil.copytree(fetched / "b12x", root.parent / "b12x")
    assert "need not be forced: VLLM_USE_B12X_MHC=1" in told()
