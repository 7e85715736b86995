"""What README and reference show is what a run prints; the README is short, links lead to files."""

from __future__ import annotations

import re
from pathlib import Path

import hotfix_rig
import pytest
from hotfix_rig import REPO, Rig

from anchors.doctor import log

README = (REPO / "README.md").read_text()
REFERENCE = (REPO / "docs/reference.md").read_text()
PAGES = [
    REPO / "README.md",
    REPO / "bench/results/README.md",
    *sorted((REPO / "docs").glob("*.md")),
]


def samples(text: str) -> list[str]:
    """Indented blocks that show output, without the indentation."""
    blocks = re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    shown = [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in blocks]
    return [block for block in shown if block.startswith(("[vision-exp]", "====="))]


def form(text: str, rig: Rig) -> str:
    """Output with the places of the README's example and with digests made equal."""
    text = text.replace(str(rig.root), "/usr/local/lib/python3.12/dist-packages/vllm")
    text = text.replace(str(rig.overlay), "/opt/dspark-patches")
    return re.sub(r"\b[0-9a-f]{12}\b", "<digest>", text)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return hotfix_rig.make(tmp_path_factory.mktemp("readme") / "rig", "0.29.0")


def test_samples_of_apply_and_of_a_refusal(rig: Rig) -> None:
    done, refused = samples(REFERENCE)
    last_line, evidence = samples(README)
    answer = rig.run("apply")
    assert (answer.code, answer.err) == (0, "")
    assert form(answer.out, rig) == form(done, rig)
    assert form(answer.out, rig).endswith(form(last_line, rig))
    assert rig.run("revert").code == 0
    model = rig.root / "models/deepseek_v4/nvidia/model.py"
    model.write_text(model.read_text().replace("class DeepseekV4MoE", "class Experts"))
    answer = rig.run("apply")
    assert (answer.code, answer.out) == (3, "")
    options = f" --root {rig.root} --overlay-root {rig.overlay}"
    assert answer.err.replace(options, "") == refused
    assert options in answer.err.splitlines()[-1]
    agreement = log.read(evidence)
    assert agreement.plans, "the evidence line is not one that doctor reads"


def test_exit_codes_are_those_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    import hotfix

    with pytest.raises(SystemExit):
        hotfix.main(["--help"])
    printed = re.findall(r"^  (\d+) {2,}", capsys.readouterr().out, re.MULTILINE)
    assert printed == re.findall(r"^\| (\d+) \|", REFERENCE, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPO).as_posix())
def test_links_lead_to_files(page: Path) -> None:
    named = re.findall(r"\]\((?!https?:)([\w./-]+)[^)]*\)", page.read_text())
    assert [name for name in named if not (page.parent / name).exists()] == []


def test_the_readme_can_be_read_in_three_minutes() -> None:
    assert len(README.split()) <= 1200
    assert len(re.findall(r"\]\(", README)) >= 8


def test_figures_of_the_readme_are_those_of_the_results() -> None:
    results = (REPO / "bench/results/README.md").read_text()
    rows = [row for row in README.split("## Six figures")[1].splitlines() if row.startswith("| ")]
    figures = [row for row in rows if "| ours |" not in row]
    assert len(figures) == 6
    cells = [cell for row in figures for cell in row.split("|")[2:]]
    numbers = set(re.findall(r"\d+(?:\.\d+)?", " ".join(cells)))
    assert sorted(numbers - set(re.findall(r"\d+(?:\.\d+)?", results))) == []
