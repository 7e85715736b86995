"""What the README shows as output is what a run prints; digests differ with every build."""

from __future__ import annotations

import re
from pathlib import Path

import hotfix_rig
import pytest
from hotfix_rig import REPO, Rig

from anchors.doctor import log

README = (REPO / "README.md").read_text()


def samples() -> list[str]:
    """Indented blocks of the README that show output, without the indentation."""
    blocks = re.findall(r"(?:^    .*\n)+", README, re.MULTILINE)
    shown = [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in blocks]
    return [block for block in shown if block.startswith("[vision-exp]")]


def form(text: str, rig: Rig) -> str:
    """Output with the places of the README's example and with digests made equal."""
    text = text.replace(str(rig.root), "/usr/local/lib/python3.12/dist-packages/vllm")
    text = text.replace(str(rig.overlay), "/opt/dspark-patches")
    return re.sub(r"\b[0-9a-f]{12}\b", "<digest>", text)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return hotfix_rig.make(tmp_path_factory.mktemp("readme") / "rig", "0.29.0")


def test_samples_of_apply_and_of_a_refusal(rig: Rig) -> None:
    done, refused, evidence = samples()
    answer = rig.run("apply")
    assert (answer.code, answer.err) == (0, "")
    assert form(answer.out, rig) == form(done, rig)
    assert rig.run("revert").code == 0
    model = rig.root / "models/deepseek_v4/nvidia/model.py"
    model.write_text(model.read_text().replace("class DeepseekV4MoE", "class Experts"))
    answer = rig.run("apply")
    assert (answer.code, answer.out) == (3, "")
    assert answer.err == refused
    agreement = log.read(evidence)
    assert agreement.plans, "the evidence line is not one that doctor reads"


def test_exit_codes_are_those_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    import hotfix

    with pytest.raises(SystemExit):
        hotfix.main(["--help"])
    printed = re.findall(r"^  (\d+) {2,}", capsys.readouterr().out, re.MULTILINE)
    assert printed == re.findall(r"^\| (\d+) \|", README, re.MULTILINE)


def test_files_that_the_readme_names_are_there() -> None:
    named = re.findall(r"\]\(([\w./-]+)\)", README)
    assert named
    assert [name for name in named if not Path(REPO, name).exists()] == []
