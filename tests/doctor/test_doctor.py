"""doctor on real trees: the screen, the log, the manifest."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import hotfix_rig
import pytest
import sources

from anchors.doctor import log, tower_memory

REPO = Path(__file__).resolve().parents[2]


def hotfix(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What the command gives, run in this process: starting one takes longer than most of them."""
    answer = hotfix_rig.call(
        list(arguments), {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **environment}
    )
    return subprocess.CompletedProcess(list(arguments), answer.code, answer.out, answer.err)


@pytest.fixture
def applied(tmp_path: Path) -> list[str]:
    """Arguments that name an applied 0.29.0."""
    root = sources.install("0.29.0", tmp_path / "site")
    arguments = ["--root", str(root), "--overlay-root", str(tmp_path / "overlay")]
    done = hotfix(*arguments, "apply")
    assert done.returncode == 0, done.stderr
    return arguments


def facts(result: subprocess.CompletedProcess[str]) -> dict[str, str]:
    found = json.loads(result.stdout)
    return {entry["fact"]: entry["value"] for entry in found["doctor"]}


def test_screen_of_an_applied_tree(applied: list[str]) -> None:
    result = hotfix(*applied, "doctor")
    assert result.returncode == 0, result.stderr
    for text in ("applied", "model-hook", "overlay", "draft tokens", "tower", "machine"):
        assert text in result.stdout
    assert len(result.stdout.splitlines()) <= 24


def test_facts(applied: list[str]) -> None:
    told = facts(hotfix(*applied, "--json", "doctor"))
    assert told["vLLM"].startswith("0.29.0 at ")
    assert told["rms_norm_eps"].startswith("forced to 1e-6 by default; need not be forced")
    assert told["caches"] == "no model-inspection entry of DeepSeek-V4"
    kept = hotfix(
        *applied, "--json", "doctor", VISION_EXP_RMS_NORM_EPS="keep", VLLM_USE_B12X_MHC="1"
    )
    assert facts(kept)["rms_norm_eps"].startswith("kept as in the checkpoint")
    assert "must be forced" in facts(kept)["rms_norm_eps"]


def test_a_pristine_tree_is_a_no_and_names_its_lying_caches(tmp_path: Path) -> None:
    root = sources.install("0.29.0", tmp_path / "site")
    entry = tmp_path / "cache" / "modelinfos" / "vllm-models-deepseek_v4-DeepseekV4ForCausalLM.json"
    entry.parent.mkdir(parents=True)
    entry.write_text("{}")
    arguments = ("--root", str(root), "--json", "doctor")
    result = hotfix(*arguments, VLLM_CACHE_ROOT=str(tmp_path / "cache"))
    assert result.returncode == 1
    assert json.loads(result.stdout)["state"] == "pristine"
    assert facts(result)["caches"] == f"cleared by apply: {entry}"


def test_manifests_of_equal_nodes_agree_and_of_others_do_not(
    applied: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "manifest.json"
    file.write_text(hotfix(*applied, "doctor", "--manifest").stdout)
    same = hotfix(*applied, "doctor", "--against", str(file))
    assert same.returncode == 0
    assert "the same as" in same.stdout
    other = json.loads(file.read_text())
    other["overlay"] = "0" * 64
    other["files"]["models/deepseek_v4/nvidia/mtp.py"] = "1" * 64
    file.write_text(json.dumps(other))
    different = hotfix(*applied, "doctor", "--against", str(file))
    assert different.returncode == 1
    assert "overlay: " in different.stdout
    assert "models/deepseek_v4/nvidia/mtp.py: " in different.stdout


def test_the_manifest_of_a_tree_that_is_not_applied_is_json_alone(tmp_path: Path) -> None:
    root = sources.install("0.29.0", tmp_path / "site")
    found = hotfix("--root", str(root), "doctor", "--manifest")
    assert found.returncode == 1
    assert json.loads(found.stdout)["files"]


@pytest.mark.parametrize("content", ["", "[]", "{}", None])
def test_a_bad_manifest_is_bad_usage(
    applied: list[str], tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "manifest.json"
    if content is not None:
        file.write_text(content)
    result = hotfix(*applied, "doctor", "--against", str(file))
    assert result.returncode == 2
    cause, hint = result.stderr.splitlines()
    assert "is no manifest" in cause
    assert cause.endswith(". Nothing was changed.")
    assert hint.endswith("python3 hotfix.py doctor --manifest > manifest.json")


LINE = (
    "(EngineCore pid={pid}) INFO 11-29 10:00:00 [evidence.py:40] [vision-exp] active pid={pid} "
    "role={role} vllm=0.26.0 plan=9f2c41d0 overlay={overlay} routing={routing} "
    "visibility={visibility} eps=1e-06\n"
)


def evidence(pid: int, role: str, **changed: str) -> str:
    fields = {"overlay": "aa", "routing": "bias_vl", "visibility": "bidirectional", **changed}
    return LINE.format(pid=pid, role=role, **fields)


def test_evidence_that_agrees() -> None:
    server = evidence(1, "MainProcess/processor", routing="-", visibility="-")
    found = log.read(f"noise\n{server}{evidence(2, 'Worker_TP0/model')}{evidence(3, 'W/model')}")
    assert found.good
    assert found.processes[1] == "Worker_TP0/model (pid 2)"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"overlay": "bb"}, "overlay differs: aa: A (pid 1); bb: B (pid 2)"),
        ({"visibility": "causal reason=platform"}, "visibility differs: bidirectional"),
        ({"routing": "text"}, "routing differs"),
    ],
)
def test_evidence_that_differs(changed: dict[str, str], named: str) -> None:
    found = log.read(evidence(1, "A") + evidence(2, "B", **changed))
    assert not found.good
    assert named in found.differences[0]
    assert len(found.differences) == 1


@pytest.mark.parametrize(
    "field", ["vllm", "plan", "overlay", "routing", "visibility", "eps", "platform"]
)
def test_evidence_agrees_in_every_field(field: str) -> None:
    line = evidence(1, "A").replace("eps=", "platform=cuda eps=")
    found = log.read(line + re.sub(rf"\b{field}=\S+", f"{field}=other", line))
    assert not found.good
    assert [words.split()[0] for words in found.differences] == [field]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "image rows passed unseen through layers (2): a (routing), b (draft). Answers",
            "image rows passed unseen through layers (2): a (routing), b (draft).",
        ),
        (
            "the start is refused: image rows pass unseen through layers of this model, a (routing)"
            " on rank 0, 1. Something in this vLLM",
            "the start is refused: image rows pass unseen through layers of this model, a (routing)"
            " on rank 0, 1",
        ),
        (
            "the start-up self-test failed: KeyError: 1",
            "the start-up self-test failed: KeyError: 1",
        ),
        (
            "VISION_EXP_SELF_TEST=0: nothing was tested at start-up",
            "VISION_EXP_SELF_TEST=0: nothing",
        ),
    ],
)
def test_image_rows_that_went_astray_are_not_good(line: str, told: str) -> None:
    """Every rank may say it; once is enough."""
    said = f"(Worker_TP0 pid=7) ERROR 11-29 10:00:00 [x.py:1] [vision-exp] {line}\n"
    found = log.read(evidence(1, "A") + said * 2)
    assert not found.good
    assert not found.differences
    assert len(found.troubles) == 1 and found.troubles[0].startswith(told)


def test_no_evidence_is_not_good(applied: list[str], tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    file.write_text("INFO nothing here\n")
    result = hotfix(*applied, "doctor", "--log", str(file))
    assert result.returncode == 1
    assert "no evidence line" in result.stdout
    plan = json.loads(hotfix(*applied, "doctor", "--manifest").stdout)["plan"]
    lines = evidence(1, "A") + evidence(2, "B")
    file.write_text(lines.replace("9f2c41d0", plan[:8]))
    assert hotfix(*applied, "doctor", "--log", str(file)).returncode == 0
    file.write_text(lines)
    other = hotfix(*applied, "doctor", "--log", str(file))
    assert other.returncode == 1
    assert "of another plan than this tree's: 9f2c41d0" in other.stdout


def test_a_log_that_is_not_there_is_bad_usage(applied: list[str], tmp_path: Path) -> None:
    result = hotfix(*applied, "doctor", "--log", str(tmp_path / "absent"))
    assert result.returncode == 2
    cause, hint = result.stderr.splitlines()
    assert f"{tmp_path / 'absent'} cannot be read" in cause
    assert cause.endswith(". Nothing was changed.")
    assert hint.startswith("next: vllm serve ")
    assert hint.endswith("; then python3 hotfix.py doctor --log server.log")


def test_tower_memory_counts_the_modules() -> None:
    torch = pytest.importorskip("torch")
    from vision_exp import preview
    from vision_exp.tower import Aligner, VisionTower

    with torch.device("meta"):
        modules = [VisionTower(preview.RELEASED), Aligner(preview.RELEASED)]
    count = sum(p.numel() for module in modules for p in module.parameters())
    assert tower_memory.parameters(1) == count + 4 * 4096
    assert tower_memory.parameters(2) < 0.51 * tower_memory.parameters(1)
    assert tower_memory.gibibytes(1) == 2 * tower_memory.parameters(1) / 2**30, "BF16"


UNSEEN = (
    "ERROR 11-29 [sightings.py:93] [vision-exp] image rows passed unseen through layers (1): a "
    "(routing). Answers about images are wrong from here on\n"
)


def verdict(result: subprocess.CompletedProcess[str]) -> tuple[str, str]:
    """The word of the first line, and the last line."""
    first, *_, last = result.stdout.splitlines()
    return first.removeprefix("[vision-exp] ").partition(":")[0], last


def test_the_first_line_is_the_verdict_and_the_last_the_next_command(
    applied: list[str], tmp_path: Path
) -> None:
    good = hotfix(*applied, "doctor")
    assert (good.returncode, verdict(good)[0]) == (0, "OK")
    off = hotfix(*applied, "doctor", VISION_EXP_DISABLE="1")
    assert (off.returncode, *verdict(off)) == (1, "BROKEN", "next: unset VISION_EXP_DISABLE")
    file = tmp_path / "server.log"
    plan = json.loads(hotfix(*applied, "doctor", "--manifest").stdout)["plan"][:8]
    causal = evidence(1, "A", visibility="causal reason=no-kernel").replace("9f2c41d0", plan)
    file.write_text(causal)
    blind = hotfix(*applied, "doctor", "--log", str(file))
    assert (blind.returncode, *verdict(blind)) == (1, "DEGRADED", "next: docs/machines.md")
    assert "image tokens are causal: no-kernel" in blind.stdout
    file.write_text(causal + evidence(2, "B", overlay="bb").replace("9f2c41d0", plan))
    broken = hotfix(*applied, "doctor", "--log", str(file))
    assert (broken.returncode, verdict(broken)[0]) == (1, "BROKEN")


def test_a_pristine_tree_is_broken_and_says_how_to_apply(tmp_path: Path) -> None:
    root = sources.install("0.29.0", tmp_path / "a b" / "site")
    found = hotfix("--root", str(root), "doctor")
    assert found.returncode == 1
    assert verdict(found) == ("BROKEN", f"next: python3 hotfix.py --root '{root}' apply")


@pytest.mark.parametrize(
    ("logs", "code", "word"),
    [
        ([evidence(1, "A") + evidence(2, "B")], 0, "OK"),
        ([evidence(1, "A"), evidence(1, "A")], 0, "OK"),
        ([evidence(1, "A"), evidence(1, "A", overlay="bb")], 1, "BROKEN"),
        ([evidence(1, "A"), "INFO nothing\n"], 1, "BROKEN"),
        (["INFO nothing\n"], 1, "BROKEN"),
        ([evidence(1, "A") + UNSEEN], 1, "BROKEN"),
        ([evidence(1, "A", visibility="causal reason=platform")], 1, "DEGRADED"),
    ],
)
def test_logs_are_judged_where_no_vllm_is(
    logs: list[str], code: int, word: str, tmp_path: Path
) -> None:
    arguments = []
    for index, text in enumerate(logs):
        (tmp_path / f"{index}.log").write_text(text)
        arguments += ["--log", str(tmp_path / f"{index}.log")]
    command = [sys.executable, "-I", "-S", str(REPO / "hotfix.py"), "doctor", *arguments]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (found.returncode, verdict(found)[0], found.stderr) == (code, word, "")


def test_a_log_from_standard_input() -> None:
    command = [sys.executable, "-I", "-S", str(REPO / "hotfix.py"), "doctor", "--log", "-"]
    text = evidence(1, "A") + evidence(2, "B", routing="text")
    found = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    assert (found.returncode, verdict(found)[0]) == (1, "BROKEN")
    assert "routing differs: bias_vl: A (pid 1); text: B (pid 2)" in found.stdout.splitlines()[0]
