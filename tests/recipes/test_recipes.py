"""The recipes, rendered by the launchers' own rules."""

from __future__ import annotations

import ast
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import vllm_rig
import yaml

ROOT = Path(__file__).resolve().parents[2]
NAME = "deepseek-v4-flash-vision-exp-hotfix.yaml"
EUGR = ROOT / "recipes" / "eugr" / NAME
SPARKRUN = ROOT / "recipes" / "sparkrun" / NAME
MOD = "deepseek-v4-vision-exp"
MODEL = "deepseek-ai/DeepSeek-V4-Flash-Vision-Exp"
PARSER = "deepseek_v4"
NODES = "one.invalid,two.invalid"  # no such hosts: asked over ssh, they answer at once
EXECUTOR = "--distributed-executor-backend"

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
# Launchers add these themselves.
LAUNCHER_FLAGS = {
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
    assert found["--enable-auto-tool-choice"] == ""
    assert found["--tool-call-parser"] == found["--reasoning-parser"] == PARSER
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
    found = options(recipe["command"].format(**recipe["defaults"]))
    # Launchers that start Ray run the command as it is; the others take this flag out.
    assert found[EXECUTOR] == "ray"
    check_options(found)


def eugr_launcher() -> Path:
    folder = os.environ.get("VISION_EXP_EUGR_LAUNCHER")
    if folder is None:
        pytest.skip("NOT RUN: VISION_EXP_EUGR_LAUNCHER names no checkout of the launcher")
    return Path(folder) / "run-recipe.py"


@pytest.mark.parametrize("no_ray", [False, True])
def test_eugr_recipe_in_a_dry_run_of_its_own_launcher(no_ray: bool) -> None:
    call = [sys.executable, str(eugr_launcher()), str(EUGR), "--dry-run", "-n", NODES]
    child = subprocess.run(
        [*call, *(["--no-ray"] if no_ray else [])], capture_output=True, text=True, timeout=60
    )
    assert child.returncode == 0, child.stderr
    assert "Warning" not in child.stdout
    assert f"--apply-mod mods/{MOD}" in child.stdout
    script = child.stdout.partition("# Run the model\n")[2].partition("\n\n")[0]
    found = options(script)
    assert found.get(EXECUTOR) == (None if no_ray else "ray")
    check_options(found)


@pytest.mark.parametrize("recipe", [EUGR, SPARKRUN], ids=["eugr", "sparkrun"])
def test_the_request_at_a_recipes_end_is_a_chat_with_an_image(recipe: Path, tmp_path: Path) -> None:
    lines = recipe.read_text().rpartition("# Then ask it about an image:")[2].splitlines()
    printf, *rest = "\n".join(line.removeprefix("#").strip() for line in lines).split(" |\ncurl ")
    (address,) = (word for word in shlex.split(rest[0]) if word.startswith("http"))
    assert address == "http://localhost:8000/v1/chat/completions"
    (tmp_path / "photo.jpg").write_bytes(b"image")
    body = subprocess.run(["bash", "-c", printf], cwd=tmp_path, capture_output=True, check=True)
    asked = json.loads(body.stdout)
    assert asked["model"] == MODEL
    text, image = asked["messages"][0]["content"]
    assert text["type"] == "text"
    assert image["image_url"]["url"] == "data:image/jpeg;base64,aW1hZ2U="


@pytest.mark.parametrize("version", vllm_rig.RELEASES)
def test_every_release_registers_the_parsers_of_the_recipes(version: str) -> None:
    package = vllm_rig.tree(version) / "vllm"
    for folder, table in (
        ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
        ("reasoning", "_REASONING_PARSERS_TO_REGISTER"),
    ):
        source = (package / folder / "__init__.py").read_text()
        body = ast.parse(source).body
        (registered,) = (
            node.value
            for node in body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == table
        )
        assert isinstance(registered, ast.Dict)
        assert PARSER in {key.value for key in registered.keys if isinstance(key, ast.Constant)}


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


def sparkrun(*arguments: str, home: Path) -> str:
    """Both outputs of a `sparkrun` of the package index that reaches no network."""
    python = sparkrun_python()
    if python is None:
        pytest.skip("NOT RUN: the sparkrun package needs Python 3.12, which is not here")
    child = subprocess.run(
        [str(python), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "https_proxy": "http://127.0.0.1:9"},
    )
    assert child.returncode == 0, child.stdout
    return child.stdout


@pytest.mark.xdist_group("sparkrun")
@pytest.mark.parametrize(
    ("recipe", "runtime", "executor"),
    [(SPARKRUN, "vllm-distributed", None), (EUGR, "vllm-ray", "ray")],
    ids=["sparkrun", "eugr"],
)
def test_recipes_pass_sparkruns_validator(
    recipe: Path, runtime: str, executor: str | None, tmp_path: Path
) -> None:
    output = sparkrun("-c", RENDER, str(recipe), home=tmp_path)
    rendered = json.loads(output.splitlines()[-1])
    assert rendered["issues"] == []
    assert (rendered["runtime"], rendered["min_nodes"]) == (runtime, 2)
    found = options(rendered["command"])
    assert found.get(EXECUTOR) == executor
    check_options(found)


@pytest.mark.xdist_group("sparkrun")
def test_sparkrun_recipe_in_a_dry_run(tmp_path: Path) -> None:
    call = ("-m", "sparkrun", "run", str(SPARKRUN), "--hosts", NODES, "--dry-run", "--offline")
    output = sparkrun(*call, "--no-auto-detect", "--trust", home=tmp_path)
    assert "skipped (no builder)" in output
    command = output.partition("Serve command:\n")[2].partition("\n\n")[0]
    check_options(options(command.strip()))
