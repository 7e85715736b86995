"""Real source, edited: the harmless is applied, the rest is refused and leaves the tree alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import hotfix_rig
import pytest
import source_edits as edits
import sources
from hotfix_rig import Rig, contents, identity

Rename = Callable[[str], str]


@dataclass(frozen=True)
class Site:
    """Where an anchor is, in words that do not come from the patcher."""

    anchor: str
    file: str
    class_name: str
    is_call: bool = False
    any_name: bool = False  # the class is known by its loader, since forks call it otherwise


CONFIG = "transformers_utils/configs/deepseek_v4.py"
MODEL = "models/deepseek_v4/nvidia/model.py"
DSPARK = "models/deepseek_v4/nvidia/dspark.py"
MTP = "models/deepseek_v4/nvidia/mtp.py"

SITES = (
    Site("config-hook", CONFIG, "DeepseekV4Config"),
    Site("model-hook", MODEL, "DeepseekV4ForCausalLM"),
    Site("dspark-hook", DSPARK, "DSparkDeepseekV4ForCausalLM", any_name=True),
    Site("mtp-hook", MTP, "DeepSeekV4MTP", any_name=True),
    Site("dspark-bias-vl", DSPARK, "DSparkDeepseekV4ForCausalLM", is_call=True),
    Site("mtp-bias-vl", MTP, "DeepSeekV4MTP", is_call=True),
)
FILES = tuple(dict.fromkeys(site.file for site in SITES))


def distinct(files: tuple[str, ...]) -> list[str]:
    """Releases whose files differ; 0.25.1, for one, has the files of 0.25.0."""
    first: dict[str, str] = {}
    for version in sources.TEXT_ONLY:
        paths = [sources.stock(version) / "vllm" / file for file in files]
        if not any(path.exists() for path in paths):
            continue
        texts = [path.read_bytes() if path.exists() else b"" for path in paths]
        first.setdefault(hashlib.sha256(b"\0".join(texts)).hexdigest(), version)
    return list(first.values())


def edit(rig: Rig, file: str, change: Callable[[str], str]) -> bool:
    path = rig.root / file
    if not path.exists():
        return False
    text = path.read_text()
    edited = change(text)
    compile(edited, file, "exec")
    path.write_bytes(edited.encode())
    return edited != text


@pytest.mark.parametrize("name", edits.HARMLESS)
@pytest.mark.parametrize("version", distinct(FILES))
def test_harmless_edit_is_applied_and_given_back(tmp_path: Path, version: str, name: str) -> None:
    rig = hotfix_rig.make(tmp_path, version)
    changed = [edit(rig, file, edits.HARMLESS[name]) for file in FILES]
    assert any(changed)
    before = contents(rig.site)
    answer = rig.run("apply")
    assert answer.code == 0, answer.err
    assert rig.run("verify").code == 0
    for site in SITES:
        path = rig.root / site.file
        assert not path.exists() or path.read_text().count(f">>> vision-exp:{site.anchor}\n") == 1
    assert rig.run("revert").code == 0
    assert contents(rig.site) == before


def _drifts() -> list[tuple[str, str, tuple[Site, ...]]]:
    """Release, mutation, and the sites that it breaks: all in one tree, since each is named."""
    found = []
    for mutations, is_call in ((edits.CLASS_MUTATIONS, False), (edits.CALL_MUTATIONS, True)):
        sites = [site for site in SITES if site.is_call == is_call]
        for name in mutations:
            broken = tuple(s for s in sites if not (name == "renamed" and s.any_name))
            found += [(v, name, broken) for v in distinct(tuple({s.file: 0 for s in broken}))]
    return found


def ids(cases: list[tuple[str, str, tuple[Site, ...]]]) -> list[str]:
    return [
        f"{version}-{'call' if sites[0].is_call else 'class'}-{name}"
        for version, name, sites in cases
    ]


def check_refused(rig: Rig, state: str, *anchors: str) -> None:
    before = identity(rig.base)
    answer = rig.run("apply")
    assert answer.code == 3
    assert identity(rig.base) == before
    assert [a for a in anchors if a not in answer.err] == []
    assert rig.run("--json", "status").json["state"] == state
    assert identity(rig.base) == before


@pytest.mark.parametrize(("version", "name", "broken"), _drifts(), ids=ids(_drifts()))
def test_broken_anchors_are_refused(
    tmp_path: Path, version: str, name: str, broken: tuple[Site, ...]
) -> None:
    rig = hotfix_rig.make(tmp_path, version)
    there = [site for site in broken if (rig.root / site.file).exists()]
    for site in there:
        if site.is_call:
            assert edit(rig, site.file, edits.CALL_MUTATIONS[name])
        else:
            mutate, own = edits.CLASS_MUTATIONS[name], site.class_name
            assert edit(rig, site.file, lambda text: mutate(text, own))  # noqa: B023  called at once
    check_refused(rig, "drifted", *(site.anchor for site in there))


@pytest.mark.parametrize("site", [s for s in SITES if s.any_name], ids=lambda site: site.anchor)
def test_draft_class_of_a_fork_is_hooked_by_its_own_name(tmp_path: Path, site: Site) -> None:
    rig = hotfix_rig.make(tmp_path, "0.29.0")
    assert edit(rig, site.file, lambda text: edits.class_renamed(text, site.class_name))
    if site.file == MTP:  # the site would do, but the overlay wraps this class by its name
        check_refused(rig, "drifted", "nvidia.mtp:DeepSeekV4MTP.embed_input_ids(input_ids)")
        return
    assert rig.run("apply").code == 0
    hook = (rig.root / site.file).read_text().partition(f">>> vision-exp:{site.anchor}")[2]
    assert f'"{site.class_name}Renamed"' in hook


MODEL_FACTS = {
    "experts": ("class DeepseekV4MoE(", "class DeepseekV4Experts("),
    "router": ("    fused_topk_bias,\n", "    fused_topk_bias as other,\n"),
    "mapper": ("def _make_deepseek_v4_weights_mapper(", "def _make_mapper("),
    "gate": ('".ffn.gate.bias"', '".ffn.norm_gate.bias"'),
}


@pytest.mark.parametrize("name", MODEL_FACTS)
@pytest.mark.parametrize("version", distinct((MODEL,)))
def test_model_without_a_fact_the_overlay_needs(tmp_path: Path, version: str, name: str) -> None:
    rig = hotfix_rig.make(tmp_path, version)
    old, new = MODEL_FACTS[name]
    assert edit(rig, MODEL, lambda text: text.replace(old, new))
    check_refused(rig, "drifted", "model-hook")


HALVES = {
    "opening-fence": lambda text, anchor: f"{text}# >>> vision-exp:{anchor}\n",
    "closing-fence": lambda text, anchor: f"{text}# <<< vision-exp:{anchor}\n",
    "no-closing-fence": lambda text, anchor: text.replace(f"# <<< vision-exp:{anchor}\n", ""),
    "no-opening-fence": lambda text, anchor: text.replace(f"# >>> vision-exp:{anchor}\n", ""),
    "twice": lambda text, anchor: text + text[text.index(f"# >>> vision-exp:{anchor}\n") :],
}


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("site", SITES, ids=lambda site: site.anchor)
def test_half_present_edit_is_refused(tmp_path: Path, site: Site, name: str) -> None:
    rig = hotfix_rig.make(tmp_path, "0.29.0")
    if name in ("no-closing-fence", "no-opening-fence", "twice"):
        assert rig.run("apply").code == 0
    path = rig.root / site.file
    path.write_text(HALVES[name](path.read_text(), site.anchor))
    check_refused(rig, "mixed", site.anchor)


@pytest.mark.parametrize("version", distinct(FILES))
def test_some_files_applied_and_some_not(tmp_path: Path, version: str) -> None:
    """One file was put back by hand: which of the two is meant is not guessed."""
    rig = hotfix_rig.make(tmp_path, version)
    before = contents(rig.site)
    stock = (rig.root / MTP).read_bytes()
    assert rig.run("apply").code == 0
    applied = contents(rig.root)
    (rig.root / MTP).write_bytes(stock)
    check_refused(rig, "mixed", "mtp-hook")
    assert "revert" in rig.run("apply").err.splitlines()[-1]
    assert rig.run("revert").code == 0
    assert contents(rig.site) == before
    assert rig.run("apply").code == 0
    assert contents(rig.root) == applied


class Parameters(dict[str, None]):
    """A draft's parameters: all names, or all but one."""

    def __init__(self, missing: str = "") -> None:
        self.missing = missing

    def __contains__(self, name: object) -> bool:
        return name != self.missing


@pytest.mark.parametrize("site", [s for s in SITES if s.is_call], ids=lambda site: site.anchor)
@pytest.mark.parametrize("version", distinct((DSPARK, MTP)))
@pytest.mark.parametrize("shape", ["guarded", "unguarded"])
def test_routing_bias_has_a_home_in_both_shapes(
    tmp_path: Path, site: Site, version: str, shape: str
) -> None:
    rig = hotfix_rig.make(tmp_path, version)
    if not (rig.root / site.file).exists():
        assert version in sources.WITHOUT_DSPARK
        return
    if shape == "unguarded":
        assert edit(rig, site.file, edits.call_unguarded)
    assert rig.run("apply").code == 0
    rename = _renaming((rig.root / site.file).read_text(), site.anchor)

    gate = "model.layers.0.mtp_block.ffn.gate."
    home = gate + "e_score_correction_bias_vl"
    assert rename(gate + "bias_vl") == home
    assert rename(home) == home, "renamed twice"
    assert rename(gate + "bias") == gate + "e_score_correction_bias"
    for other in (gate + "weight", "x.attn.bias_vl", "x.ffn.gate.bias_vl.scale", "bias_vl"):
        assert rename(other) in (other, other.replace(edits.OLD, edits.NEW)), other
    homeless = _renaming((rig.root / site.file).read_text(), site.anchor, Parameters(home))
    with pytest.raises(KeyError, match="e_score_correction_bias_vl"):
        homeless(gate + "bias_vl")


def _renaming(text: str, anchor: str, parameters: Parameters | None = None) -> Rename:
    """The injected lines and the release's own renaming below them, as a function of the name."""
    lines = text.splitlines()
    (start,) = (i for i, line in enumerate(lines) if line.endswith(f">>> vision-exp:{anchor}"))
    stop = next(i for i in range(start, len(lines)) if "param = params_dict[" in lines[i])
    indent = len(lines[stop]) - len(lines[stop].lstrip())
    body = "\n".join("    " + line[indent:] for line in lines[start:stop])
    variable = lines[stop].partition("[")[2].rstrip("]")
    space: dict[str, object] = {"params_dict": Parameters() if parameters is None else parameters}
    exec(f"def rename({variable}):\n{body}\n    return {variable}\n", space)
    return cast(Rename, space["rename"])
