"""The command line as people and scripts use it: usage, JSON, quiet, dry run, diff, list."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import hotfix_rig
import pytest
from bad_environments import check_refusal
from hotfix_rig import REPO, Answer, Rig, identity

import hotfix
from anchors.sites import all_anchors

KEYS = {"schema", "tool", "state", "exit", "vllm", "plan", "files", "overlay", "caches", "error"}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return hotfix_rig.make(tmp_path_factory.mktemp("pristine") / "rig", "0.29.0")


@pytest.fixture(scope="module")
def applied(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    rig = hotfix_rig.make(tmp_path_factory.mktemp("applied") / "rig", "0.29.0")
    assert rig.run("apply").code == 0
    return rig


@pytest.mark.parametrize(
    ("words", "cause", "prog"),
    [
        ([], "VERB", "hotfix.py"),
        (["no-such-verb"], "no-such-verb", "hotfix.py"),
        (["apply", "extra"], "extra", "hotfix.py"),
        (["--no-such", "apply"], "--no-such", "hotfix.py"),
        (["--no-such"], "unrecognized arguments: --no-such", "hotfix.py"),
        (["explain"], "ID", "hotfix.py explain"),
        (["--root", "", "apply"], "--root: it is empty", "hotfix.py"),
        (["apply", "--overlay-root", ""], "--overlay-root: it is empty", "hotfix.py apply"),
    ],
)
def test_bad_usage(pristine: Rig, words: list[str], cause: str, prog: str) -> None:
    answer = hotfix_rig.call(words, pristine.environment)
    first, second = answer.err.splitlines()
    assert answer.code == 2
    assert first.startswith("[vision-exp] ")
    assert cause in first
    assert first.endswith(". Nothing was changed.")
    assert second == f"next: python3 {prog} --help"
    assert answer.out == ""


def test_bad_usage_is_json_too(pristine: Rig) -> None:
    answer = pristine.spawn("--json", "no-such-verb")
    assert answer.code == answer.json["exit"] == 2
    assert answer.json["error"]["reference"] == "usage"


@pytest.mark.parametrize("verb", ["apply", "revert", "status", "verify", "diff", "doctor"])
@pytest.mark.parametrize("which", ["pristine", "applied", "no-vllm"])
def test_json_is_one_object_with_the_agreed_keys(
    request: pytest.FixtureRequest, which: str, verb: str
) -> None:
    rig: Rig = request.getfixturevalue("applied" if which == "applied" else "pristine")
    words = ["--json", verb, *(["--dry-run"] if verb in ("apply", "revert") else [])]
    if which == "no-vllm":
        answer = hotfix_rig.call(["--root", "/nonexistent", *words], rig.environment)
        assert answer.code == 6
        assert answer.json["error"].keys() >= {"reference", "message", "context", "hint"}
    else:
        answer = rig.run(*words)
    assert answer.json.keys() >= KEYS
    assert answer.json["exit"] == answer.code
    assert answer.err == ""
    for file in answer.json["files"]:
        assert file.keys() >= {"path", "before", "after", "anchors"}
        assert all(anchor.keys() >= {"id", "state"} for anchor in file["anchors"])


def test_quiet(pristine: Rig, applied: Rig) -> None:
    assert applied.run("-q", "apply") == Answer(0, "", "")
    assert applied.run("apply", "-q") == Answer(0, "", "")
    answer = hotfix_rig.call(["--root", "/nonexistent", "-q", "apply"], pristine.environment)
    assert (answer.code, answer.out) == (6, "")
    assert answer.err


def test_no_colour_without_a_terminal(applied: Rig) -> None:
    for words in (["status"], ["diff", "--reverse"], ["list"]):
        assert "\x1b" not in applied.spawn(*words).out
    assert "\x1b" in applied.spawn("--color", "always", "status").out


def test_a_closed_pipe_is_no_failure(applied: Rig) -> None:
    command = [
        sys.executable,
        "-B",
        str(hotfix_rig.HOTFIX),
        *applied.arguments("diff", "--reverse"),
    ]
    line = 'set -o pipefail; "$@" | head -n 1'
    done = subprocess.run(
        ["bash", "-c", line, "bash", *command],
        env=applied.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_dry_run_shows_the_diff_and_writes_nothing(pristine: Rig, applied: Rig) -> None:
    before = identity(pristine.base), identity(applied.base)
    diff = pristine.run("diff").out
    assert diff.count("\n+++ ") == 7  # config, and model and two drafts of each platform
    dry = pristine.run("apply", "--dry-run")
    assert dry.code == 0
    assert diff in dry.out
    assert applied.run("revert", "--dry-run").code == 0
    assert (identity(pristine.base), identity(applied.base)) == before


def test_the_diff_is_what_apply_writes(tmp_path: Path) -> None:
    """`git apply` of the printed diff gives what `apply` gives; the reverse takes it back."""
    first, second = (hotfix_rig.make(tmp_path / name, "0.29.0") for name in ("a", "b"))
    overlay = ["--overlay-root", str(first.overlay)]
    stock = hotfix_rig.contents(second.root)
    text = hotfix_rig.call(["--root", str(second.root), *overlay, "diff"], first.environment).out
    assert first.run("apply").code == 0
    patched = {k: v for k, v in hotfix_rig.contents(first.root).items() if ".vision-exp" not in k}
    reverse = first.run("diff", "--reverse").out
    for diff, wanted in ((text, patched), (reverse, stock)):
        strip = 1 if "\n+++ b/models" in diff else 2
        subprocess.run(
            ["git", "apply", f"-p{strip}", "-"],
            input=diff,
            text=True,
            cwd=second.root,
            env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path)},
            check=True,
        )
        assert hotfix_rig.contents(second.root) == wanted


def test_exit_code_of_diff(pristine: Rig, applied: Rig) -> None:
    assert pristine.run("diff", "--exit-code").code == 1
    assert applied.run("diff", "--exit-code").code == 0
    assert applied.run("diff", "--reverse", "--exit-code").code == 1


def test_strict(tmp_path: Path, applied: Rig) -> None:
    rig = hotfix_rig.make(tmp_path / "rig", "0.24.0")
    before = identity(rig.base)
    answer = rig.run("apply", "--strict")
    assert answer.code == 3
    assert "dspark" in answer.err
    assert identity(rig.base) == before
    assert applied.run("apply", "--strict").code == 0


def test_list_and_explain(pristine: Rig) -> None:
    listing = pristine.run("list")
    assert listing.code == 0
    for anchor in all_anchors():
        assert anchor.id in listing.out
        answer = pristine.run("explain", anchor.id)
        assert answer.code == 0
        assert anchor.until in " ".join(answer.out.split())
    near = pristine.run("explain", "model-hok")
    check_refusal(near, 2, "there is no site 'model-hok'")
    assert near.err.splitlines()[-1] == "next: python3 hotfix.py explain model-hook"
    far = pristine.run("explain", "nope")
    check_refusal(far, 2, "there is no site 'nope'")
    assert far.err.splitlines()[-1] == "next: python3 hotfix.py list"


def test_version() -> None:
    command = [sys.executable, "-B", str(hotfix_rig.HOTFIX), "--version"]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def test_a_second_apply_and_status_do_without_libcst(applied: Rig) -> None:
    probe = (
        "import sys; sys.modules['libcst'] = None; sys.path.insert(0, sys.argv.pop(1)); "
        "import hotfix; raise SystemExit(hotfix.main(sys.argv[1:]))"
    )
    for verb in ("apply", "status", "verify", "revert"):
        words = applied.arguments(verb, *(["--dry-run"] if verb == "revert" else []))
        done = subprocess.run(
            [sys.executable, "-B", "-c", probe, str(REPO), *words],
            env=applied.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, (verb, done.stderr)
        said = "compared with the receipt only" in done.stdout
        assert said == (verb == "verify"), "a weaker check must say that it is one"


def test_json_of_apply_is_kept_in_the_receipt(applied: Rig) -> None:
    receipt = json.loads((applied.root / ".vision-exp" / "receipt.json").read_text())
    report = applied.run("--json", "status").json
    assert receipt["plan"] == report["plan"]
    assert [f["path"] for f in receipt["files"]] == [f["path"] for f in report["files"]]


def test_bad_usage_says_what_was_probably_meant(capsys: pytest.CaptureFixture[str]) -> None:
    for words, hint in (
        (["statsu"], "next: did you mean status? python3 hotfix.py --help lists all"),
        (["diff", "-U", "-3"], "next: python3 hotfix.py diff --help"),
    ):
        with pytest.raises(SystemExit) as stopped:
            hotfix.main(words)
        assert stopped.value.code == 2
        assert capsys.readouterr().err.splitlines()[-1] == hint


def test_an_answer_that_cannot_be_written_is_no_success() -> None:
    command = [sys.executable, str(REPO / "hotfix.py"), "list"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, "cannot print the answer" in done.stderr) == (6, True)


def test_diff_in_colour(pristine: Rig) -> None:
    plain, tinted = pristine.run("diff"), pristine.run("diff", "--color", "always")
    assert "\033[32m+" in tinted.out
    assert re.sub(r"\033\[\d*m", "", tinted.out) == plain.out
