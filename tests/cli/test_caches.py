"""Exactly the caches that would lie are cleared, wherever the server will look for them."""

from __future__ import annotations

import importlib.util
import py_compile
from pathlib import Path

import hotfix_rig
import pytest
from bad_environments import without_privilege
from hotfix_rig import Answer, Rig, contents, identity

MODEL = "models/deepseek_v4/nvidia/model.py"
ENTRY = "vllm-models-deepseek_v4-DeepseekV4ForCausalLM.json"
OTHERS = (
    "vllm-model_executor-models-llama-LlamaForCausalLM.json",
    "vllm-models-deepseek_v3-DeepseekV3ForCausalLM.json",
)
PLACES = {
    "home": ("home/.cache/vllm", {}),
    "xdg": ("xdg/vllm", {"XDG_CACHE_HOME": "xdg"}),
    "explicit": ("explicit", {"VLLM_CACHE_ROOT": "explicit"}),
}


def run(rig: Rig, variables: dict[str, str], *words: str) -> Answer:
    extra = {name: str(rig.base / value) for name, value in variables.items()}
    return hotfix_rig.call(rig.arguments(*words), {**rig.environment, **extra})


def seed(folder: Path) -> None:
    infos = folder / "modelinfos"
    infos.mkdir(parents=True, exist_ok=True)
    for name in (ENTRY, *OTHERS):
        (infos / name).write_text('{"hash": "0", "modelinfo": {}}')
    for name, text in (("one", "vllm/models/deepseek_v4/nvidia/model.py"), ("two", "llama")):
        entry = folder / "torch_compile_cache" / name / "rank_0"
        entry.mkdir(parents=True, exist_ok=True)
        (entry / "computation_graph.py").write_text(f"# {text}\n")


@pytest.mark.parametrize("place", PLACES)
def test_model_info_and_compiled_code(rig: Rig, place: str) -> None:
    where, variables = PLACES[place]
    cache = rig.base / where
    for verb in ("apply", "revert"):
        seed(cache)
        assert run(rig, variables, verb).code == 0
        left = {str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file()}
        assert left == {
            *(f"modelinfos/{name}" for name in OTHERS),
            "torch_compile_cache/two/rank_0/computation_graph.py",
        }


def test_nothing_is_cleared_when_nothing_changes(rig: Rig) -> None:
    assert rig.run("apply").code == 0
    seed(rig.cache)
    before = identity(rig.base)
    assert rig.run("apply").code == 0
    assert identity(rig.base) == before


def test_a_reading_verb_clears_nothing(rig: Rig) -> None:
    seed(rig.cache)
    before = identity(rig.base)
    for words in (["status"], ["apply", "--dry-run"], ["diff"], ["doctor"], ["verify"]):
        rig.run(*words)
    assert identity(rig.base) == before


@pytest.mark.parametrize("mode", list(py_compile.PycInvalidationMode), ids=lambda m: m.name)
def test_byte_code_of_rewritten_files(rig: Rig, mode: py_compile.PycInvalidationMode) -> None:
    """An unchecked .pyc would run the old code for ever."""
    other = rig.root / "models/deepseek_v4/nvidia/flashmla.py"
    for verb in ("apply", "revert"):
        for source in (rig.root / MODEL, other):
            py_compile.compile(str(source), doraise=True, invalidation_mode=mode)
        other_python = Path(importlib.util.cache_from_source(str(rig.root / MODEL)))
        other_python.with_name("model.cpython-399.pyc").write_bytes(b"old")
        assert rig.run(verb).code == 0
        left = [path.name for path in rig.root.rglob("*.pyc")]
        assert [name.split(".")[0] for name in left] == ["flashmla"]


def test_cache_that_cannot_be_cleared_is_an_error(rig: Rig) -> None:
    """Here the entry lies in a folder that cannot be written."""
    seed(rig.cache)
    infos = rig.cache / "modelinfos"
    infos.chmod(0o555)
    before = contents(rig.base)
    answer = without_privilege(rig, "apply")
    assert answer.code == 6, answer.err
    assert ENTRY in answer.cause
    assert "next:" in answer.err
    assert contents(rig.base) == before
