"""The recipes, rendered by the launchers' own rules."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
NAME = "deepseek-v4-flash-vision-exp-hotfix.yaml"
EUGR = ROOT / "recipes" / "eugr" / NAME
SPARKRUN = ROOT / "recipes" / "sparkrun" / NAME
MOD = "deepseek-v4-vision-exp"
MODEL = "deepseek-ai/DeepSeek-V4-Flash-Vision-Exp"

# Keys that each launcher knows; it ignores others without a word.
EUGR_KEYS = {
    "recipe_version",
    "name",
    "description",
    "container",
    "command",
    "model",
    "mods",
    "defaults",
    "env",
    "build_args",
    "cluster_only",
    "solo_only",
}
SPARKRUN_KEYS = {
    "recipe_version",
    "model",
    "runtime",
    "container",
    "min_nodes",
    "max_nodes",
    "metadata",
    "defaults",
    "env",
    "command",
    "pre_exec",
    "mods",
    "executor_config",
}
# The eugr launcher adds these itself.
LAUNCHER_FLAGS = {
    "--distributed-executor-backend",
    "--nnodes",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--headless",
}


def options(command: str) -> dict[str, str]:
    """Flags of a rendered `vllm serve` command; a flag without a value maps to ''."""
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:3] == ["vllm", "serve", MODEL]
    found: dict[str, str] = {}
    flag = ""
    for word in words[3:]:
        if word.startswith("--"):
            flag = word
            found[flag] = ""
        else:
            assert found[flag] == "", f"two values for {flag}"
            found[flag] = word
    return found


def check_options(found: dict[str, str]) -> None:
    assert found["--served-model-name"] == MODEL
    assert found["--tokenizer-mode"] == "deepseek_v4"
    assert found["--block-size"] == "256"
    assert found["--kv-cache-dtype"] == "fp8"
    assert found["--mm-encoder-tp-mode"] == "data"
    assert int(found["--max-num-batched-tokens"]) >= 384 + 3
    assert json.loads(found["--limit-mm-per-prompt"])["image"] >= 1
    assert json.loads(found["--speculative-config"]) == {
        "method": "dspark",
        "num_speculative_tokens": 6,
    }
    assert not LAUNCHER_FLAGS & set(found)


def test_eugr_recipe_renders_by_str_format() -> None:
    recipe = yaml.safe_load(EUGR.read_text())
    assert recipe["recipe_version"] == "1"
    assert set(recipe) <= EUGR_KEYS
    assert recipe["mods"] == [f"mods/{MOD}"]
    assert all(isinstance(value, str) for value in recipe["env"].values())
    check_options(options(recipe["command"].format(**recipe["defaults"])))


def test_eugr_recipe_names_every_placeholder() -> None:
    recipe = yaml.safe_load(EUGR.read_text())
    for name in recipe["defaults"]:
        rest = {key: value for key, value in recipe["defaults"].items() if key != name}
        with pytest.raises(KeyError):
            recipe["command"].format(**rest)


def test_sparkrun_recipe_copies_and_runs_the_mod() -> None:
    recipe = yaml.safe_load(SPARKRUN.read_text())
    assert recipe["recipe_version"] == "2"
    assert set(recipe) <= SPARKRUN_KEYS
    assert recipe["runtime"] == "vllm-distributed"
    copy, call = recipe["pre_exec"]
    assert copy["dest"] == f"/workspace/mods/{MOD}"
    assert call == f"cd /workspace/mods/{MOD} && bash run.sh"


RENDER = """
import json, sys
from sparkrun.core.recipe import Recipe
recipe = Recipe.load(sys.argv[1])
chain = recipe.build_config_chain({})
print(json.dumps({"issues": recipe.validate(), "command": recipe.render_command(chain),
                  "runtime": recipe.runtime, "min_nodes": recipe.min_nodes}))
"""


def sparkrun_python() -> Path | None:
    """Interpreter of an environment with the `sparkrun` package, made once where Python 3.12 is."""
    folder = Path(os.environ.get("VISION_EXP_TEST_CACHE", ROOT / ".cache")) / "sparkrun"
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python
    found = shutil.which("python3.12")
    works = found and subprocess.run([found, "--version"], capture_output=True).returncode == 0
    if not works:
        # pyenv keeps versions that are not on PATH as such.
        kept = sorted(Path.home().glob(".pyenv/versions/3.12.*/bin/python3.12"))
        found = str(kept[-1]) if kept else None
    if found is None:
        return None
    subprocess.run([found, "-m", "venv", "--clear", str(folder)], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "-q", "sparkrun"], check=True)
    (folder / "complete").touch()
    return python


@pytest.mark.xdist_group("sparkrun")
def test_sparkrun_recipe_renders_by_its_own_loader() -> None:
    python = sparkrun_python()
    if python is None:
        pytest.skip("NOT RUN: the sparkrun package needs Python 3.12, which is not here")
    child = subprocess.run(
        [str(python), "-c", RENDER, str(SPARKRUN)], capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stderr
    rendered = json.loads(child.stdout.splitlines()[-1])
    assert rendered["issues"] == []
    assert (rendered["runtime"], rendered["min_nodes"]) == ("vllm-distributed", 2)
    check_options(options(rendered["command"]))
