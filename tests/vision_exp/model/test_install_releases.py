"""The overlay in every vLLM release that it serves, patched by hotfix.py: one child for each.

The child (in_vllm/child_overlay.py) runs many named checks on vLLM's own registry, processor and
model class, and records what a text-only checkpoint is there. A second child records the same in
the stock tree.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import vllm_rig

TESTS = Path(__file__).parents[1]
CHECK_MODULES = (
    "checks_amd",
    "checks_building",
    "checks_config",
    "checks_model",
    "checks_images",
    "checks_processor",
    "checks_refusals",
    "checks_runner",
    "checks_weights",
    "two_ranks",
)

#: A part of a check's name: such checks alone, in a stock tree whose hooks the child calls. The
#: other tests have nothing to look at then. For one who works on a check, and for bench/mutants.py.
ONLY = os.environ.get("VISION_EXP_TEST_CHECKS", "")

#: Modules that no release has.
IN_FORKS = {"vllm.models.deepseek_v4.nvidia.b12x"}

# Functions that a process wraps once it has seen a Vision-Exp config. Each asks its instance
# first; nothing on a text-only model's path is among them but what `routing.hooks` says.
WRAPPED = {
    "DeepseekV4ForCausalLM": {"__init__"},
    "DeepseekV4MoE": {"__init__", "forward"},
    "DeepSeekV4MTP": {"embed_input_ids"},
}

# Functions whose source the anchors edit: the drafts' loaders take one more name.
EDITED = {
    "DeepSeekV4MTP": {"load_weights"},
    "DSparkDeepseekV4ForCausalLM": {"load_weights"},
}

by_release = pytest.mark.parametrize("release", vllm_rig.BY_RELEASE)


@functools.cache
def outcome(release: str) -> dict[str, Any]:
    """What both children of a release found. Cached: all tests of a release share one process."""
    with tempfile.TemporaryDirectory(prefix="vision-exp-release-") as name:
        folder = Path(name)
        tree = vllm_rig.tree(release)
        stock = None
        if not ONLY:
            stock = _run("child_stock.py", tree, folder, {})["text"]
            tree = vllm_rig.patched_tree(release, folder / "patched")
        own = {"VLLM_CACHE_ROOT": str(folder / "cache"), "VISION_EXP_FAST_PIXELS": "1"}
        found = _run("child_overlay.py", tree, folder, own)
        return {**found, "stock text": stock}


def _run(script: str, tree: Path, folder: Path, env: dict[str, str]) -> dict[str, Any]:
    result = folder / f"{script}.json"
    done: subprocess.CompletedProcess[str] = vllm_rig.run_child(
        TESTS / "in_vllm" / script,
        tree,
        str(folder / "checkpoints"),
        str(result),
        *filter(None, [ONLY]),
        env=env,
    )
    if not result.exists():
        pytest.fail(f"{script} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return {**json.loads(result.read_text()), "log": done.stdout + done.stderr}


def declared_checks() -> set[str]:
    """Every check in the children's sources, so that one that never ran is noticed."""
    names = set()
    for module in CHECK_MODULES:
        text = (TESTS / "model" / "in_vllm" / f"{module}.py").read_text()
        for part in text.split("@check\ndef ")[1:]:
            names.add(f"{module.removeprefix('checks_')}.{part.split('(')[0]}")
    return {name for name in names if ONLY in name}


@by_release
def test_every_check_passes(release: str) -> None:
    checks = outcome(release)["checks"]
    assert set(checks) == declared_checks()
    failed = {name: trace for name, trace in checks.items() if trace}
    assert not failed, "\n\n".join(f"{name}\n{trace}" for name, trace in failed.items())


def differing(stock: dict[str, Any], found: dict[str, Any]) -> dict[str, set[str]]:
    """Class -> names of functions whose code is another than in the stock tree."""
    assert found.keys() == stock.keys()
    names = {
        one: {
            key
            for key in stock[one].keys() | found[one].keys()
            if found[one].get(key) != stock[one].get(key)
        }
        for one in stock
    }
    return {one: keys for one, keys in names.items() if keys}


@by_release
def test_text_only_checkpoints_are_as_in_the_stock_tree(release: str) -> None:
    found = outcome(release)
    assert found["text"].keys() == found["stock text"].keys()
    for what, stock in found["stock text"].items():
        if what == "functions":
            assert differing(stock, found["text"][what]) == EDITED
        else:
            assert found["text"][what] == stock, f"before any vision config: {what}"


@by_release
def test_text_only_checkpoints_are_as_stock_beside_a_vision_model(release: str) -> None:
    """In a process that has served a Vision-Exp checkpoint, only the listed wraps differ."""
    found = outcome(release)
    for what, stock in found["stock text"].items():
        after = found["text_after"][what]
        if what == "functions":
            both = {name: WRAPPED.get(name, set()) | EDITED.get(name, set()) for name in stock}
            assert differing(stock, after) == {name: keys for name, keys in both.items() if keys}
        else:
            assert after == stock, f"after a vision config: {what}"


@by_release
def test_the_evidence_line_names_what_is_active(release: str) -> None:
    lines = [line for line in outcome(release)["log"].splitlines() if "[vision-exp] active" in line]
    assert lines
    line = next(one for one in lines if "/model " in one)
    for part in ("pid=", "role=", f"vllm={release}", "plan=", "overlay=", "routing=bias_vl"):
        assert part in line, line
    assert "eps=1e-06" in line
    assert "unknown" not in line
    built: dict[str, list[str]] = {}
    for one in lines:
        process, role = one.split("pid=")[1].split()[:2]
        built.setdefault(process, []).append(role.split("/")[-1])
    # One line in a process; a model that is built after a processor has its own.
    once = (["model"], ["processor"], ["processor", "model"])
    assert all(roles in once for roles in built.values()), built


@by_release
def test_each_function_of_vllm_is_wrapped_once(release: str) -> None:
    found = outcome(release)
    twice = {name: by for name, by in found["wrapped"].items() if len(by) > 1}
    assert not twice, twice
    rooms = {by.split(".")[1] for wrappers in found["wrapped"].values() for by in wrappers}
    assert rooms == {"install", "model", "chat", "engine", "visibility", "routing"}
    assert WRAPPED.keys() <= {name.split(":")[1].split(".")[0] for name in found["wrapped"]}
    assert set(found["missing"]) <= IN_FORKS, "these could not be looked at"
