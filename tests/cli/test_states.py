"""Every state of the command line, reached on real source."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import hotfix_rig
import pytest
import sources
from bad_environments import CONFIG, MODEL, MTP
from hotfix_rig import Answer, Rig, contents
from states import STATE, check_refused, state

from anchors.writing.effects import Effects


def test_pristine_and_applied(rig: Rig) -> None:
    assert state(rig) == "pristine"
    assert rig.run("apply").code == 0
    assert state(rig) == "applied"


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"], ids=["lf", "crlf"])
def test_applied_without_a_final_newline(rig: Rig, newline: bytes) -> None:
    path = rig.root / CONFIG
    path.write_bytes(path.read_bytes().rstrip().replace(b"\n", newline))
    before = path.read_bytes()
    assert rig.run("apply").code == 0
    assert rig.run("verify").code == 0
    assert rig.run("revert").code == 0
    assert path.read_bytes() == before


def test_superseded(tmp_path: Path) -> None:
    assert state(hotfix_rig.make(tmp_path / "rig", "0.33.0")) == "superseded"


def test_not_applicable(rig: Rig) -> None:
    shutil.rmtree(rig.root / "models/deepseek_v4/nvidia")
    assert state(rig) == "not-applicable"
    check_refused(rig, "nvidia")


def test_missing(rig: Rig) -> None:
    (rig.root / MODEL).unlink()
    assert state(rig) == "missing"
    check_refused(rig, "model.py")


def test_drifted(rig: Rig) -> None:
    path = rig.root / MODEL
    path.write_text(path.read_text().replace("class DeepseekV4MoE", "class Experts"))
    assert state(rig) == "drifted"
    check_refused(rig, "model-hook", "DeepseekV4MoE")


def test_applied_without_a_receipt(applied: Rig) -> None:
    fresh = contents(applied.base)
    shutil.rmtree(applied.root / STATE)
    assert state(applied) == "applied-unrecorded"
    targets = contents(applied.root)
    assert applied.run("verify").code == 0
    assert applied.run("apply").code == 0
    assert state(applied) == "applied"
    assert contents(applied.base).keys() == fresh.keys()
    assert {k: v for k, v in contents(applied.root).items() if k in targets} == targets


def test_revert_without_a_receipt(applied: Rig) -> None:
    shutil.rmtree(applied.root / STATE)
    assert applied.run("revert").code == 0
    assert contents(applied.site) == contents(sources.stock("0.29.0"))


def test_stale_after_a_reinstall(applied: Rig) -> None:
    fresh = contents(applied.root)
    sources.install("0.29.0", applied.site)
    assert state(applied) == "stale"
    assert applied.run("apply").code == 0
    after = contents(applied.root)
    assert {k: v for k, v in after.items() if STATE not in k} == {
        k: v for k, v in fresh.items() if STATE not in k
    }


def test_upgrade_of_vllm_under_a_receipt(applied: Rig) -> None:
    shutil.rmtree(applied.root / "models")
    for info in applied.site.glob("*.dist-info"):
        shutil.rmtree(info)
    sources.install("0.28.0", applied.site)
    assert state(applied) == "stale"
    assert applied.run("apply").code == 0
    assert applied.run("revert").code == 0
    assert not (applied.root / STATE).exists()
    assert (applied.root / MODEL).read_bytes() == (
        sources.stock("0.28.0") / "vllm" / MODEL
    ).read_bytes()


def test_upgrade_to_a_vllm_that_serves_the_model(applied: Rig) -> None:
    shutil.rmtree(applied.root / "models")
    for info in applied.site.glob("*.dist-info"):
        shutil.rmtree(info)
    sources.install("0.31.0", applied.site)
    assert state(applied) == "superseded"
    assert applied.run("apply").code == 0
    native = "serves this model natively"
    for verb, words in (
        (["revert", "--dry-run"], "what is left of the hotfix would be taken out"),
        (["revert"], "what was left of the hotfix is taken out; this vLLM needs none"),
        (["revert"], "nothing to take out; this vLLM needs no hotfix"),
    ):
        answer = applied.run(*verb)
        first, second, *_, last = answer.out.splitlines()
        assert answer.code == 0
        assert first.endswith(": superseded")
        assert second.endswith(native)
        assert last == f"=====> {words}"
    assert applied.run("--json", "revert").json["state"] == "superseded"
    assert not (applied.root / STATE).exists()
    assert not (applied.overlay / "vision_exp").exists()
    assert contents(applied.root / "models") == contents(sources.stock("0.31.0") / "vllm/models")


@pytest.mark.parametrize("file", [MODEL, MTP, CONFIG])
def test_edited_inside_a_block(applied: Rig, file: str) -> None:
    path = applied.root / file
    text = path.read_text()
    path.write_text(text.replace("import functools, hashlib", "import functools,  hashlib", 1))
    assert path.read_text() != text
    assert state(applied) == "edited"
    check_refused(applied, Path(file).name)
    assert applied.run("verify").code == 1


def test_edited_outside_the_blocks_is_kept_by_revert(applied: Rig) -> None:
    path = applied.root / MTP
    path.write_text("# a line of the owner's own\n" + path.read_text())
    assert state(applied) == "edited"
    check_refused(applied, "mtp.py")
    answer = applied.run("revert")
    stock = (sources.stock("0.29.0") / "vllm" / MTP).read_text()
    if answer.code == 0:
        assert path.read_text() == "# a line of the owner's own\n" + stock
    else:
        assert answer.code == 3


def test_mixed(applied: Rig) -> None:
    path = applied.root / CONFIG
    path.write_text(path.read_text() + "# >>> vision-exp:config-hook\n")
    assert state(applied) == "mixed"
    check_refused(applied, "deepseek_v4.py")


def test_interrupted(rig: Rig) -> None:
    stock = contents(rig.site)
    _die_at(rig, "apply", "rename", 3)
    assert state(rig) == "interrupted"
    assert contents(rig.site) != stock
    assert rig.run("verify").code == 1
    assert rig.run("apply").code == 0
    assert state(rig) == "applied"
    _die_at(rig, "revert", "rename", 3)
    assert state(rig) == "interrupted"
    assert rig.run("revert").code == 0
    assert contents(rig.site) == stock


def _die_at(rig: Rig, verb: str, step: str, count: int) -> None:
    """Run the verb in a child that vanishes ahead of its COUNT-th step of this kind."""
    child = os.fork()
    if child == 0:
        left = count

        def before_step(effects: Effects, what: str, path: str) -> None:
            nonlocal left
            left -= what == step
            if left == 0:
                os._exit(99)

        Effects.before_step = before_step  # type: ignore[method-assign]
        os._exit(rig.run(verb).code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 99


FOREIGN = {
    "mark of another hotfix": (MODEL, "\n# [vision-exp-hotfix] begin\n"),
    "another hotfix's import": (MODEL, "\nfrom vision_exp import patch_model\n"),
    "routing bias of a fork": (MODEL, '\nROUTING = "gate.bias_vl"\n'),
    "vision fields of a fork": (CONFIG, "\nVISION = ('vision_n_layers', 'vision_dim')\n"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign(rig: Rig, kind: str) -> None:
    file, text = FOREIGN[kind]
    with (rig.root / file).open("a") as target:
        target.write(text)
    assert state(rig) == "foreign"
    check_refused(rig, Path(file).name)


def test_revert_of_a_fork_does_not_call_it_pristine(rig: Rig) -> None:
    file, text = FOREIGN["vision fields of a fork"]
    with (rig.root / file).open("a") as target:
        target.write(text)
    answer = rig.run("--json", "revert")
    assert (answer.code, answer.json["state"]) == (0, state(rig))


def test_words_about_native_code_do_not_stop_revert(applied: Rig) -> None:
    registry = applied.root / "model_executor/models/registry.py"
    registry.unlink()
    registry.mkdir()  # cannot be read as a file, by root neither
    answer = applied.run("revert")
    assert answer.code == 0, answer.err
    assert not (applied.root / STATE).exists()


def test_foreign_tower_beside_the_model(rig: Rig) -> None:
    (rig.root / "models/deepseek_v4/nvidia/vision_model.py").write_text("class Vision: ...\n")
    assert state(rig) == "foreign"
    check_refused(rig, "vision_model.py")


def test_overlay_changed_after_apply(applied: Rig) -> None:
    fresh = contents(applied.overlay)
    with (applied.overlay / "vision_exp" / "install.py").open("a") as file:
        file.write("# changed\n")
    assert state(applied) != "applied"
    assert applied.run("verify").code == 1
    assert applied.run("apply").code == 0
    assert contents(applied.overlay) == fresh


def test_overlay_gone_after_apply(applied: Rig) -> None:
    fresh = contents(applied.overlay)
    shutil.rmtree(applied.overlay)
    assert state(applied) != "applied"
    assert applied.run("verify").code == 1
    assert applied.run("apply").code == 0
    assert contents(applied.overlay) == fresh


def test_two_vllms_share_one_overlay(tmp_path: Path, applied: Rig) -> None:
    other = hotfix_rig.make(tmp_path / "other", "0.28.0")

    def on_other(verb: str) -> Answer:
        words = ["--root", str(other.root), "--overlay-root", str(applied.overlay), verb]
        return hotfix_rig.call(words, other.environment)

    assert on_other("apply").code == 0
    assert on_other("revert").code == 0
    assert applied.run("verify").code == 0, "the overlay of the other vLLM was taken away"
    assert applied.run("revert").code == 0
    assert not (applied.overlay / "vision_exp").exists()
