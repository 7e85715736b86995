"""Target files that are not what vLLM ships: drifted, folders, pipes, too much for the parser."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from bad_environments import CONFIG, MODEL, MTP, check_refusal
from hotfix_rig import Rig, identity, make

from anchors.releases import known

BAD = "drifted"
BAD_CONTENT = {
    "missing": None,
    "empty": b"",
    "binary": bytes(range(256)) * 64,
    "not-utf-8": "# ägypten\nX = 1\n".encode("latin-1"),
    "syntax-error": b"def broken(:\n",
    "carriage-returns": b"class DeepseekV4Config:\r    pass\r",
    "nul": b"X = 1\0\n",
}


@pytest.mark.parametrize("file", [MODEL, MTP, CONFIG])
@pytest.mark.parametrize("kind", BAD_CONTENT)
def test_bad_target_file(rig: Rig, file: str, kind: str) -> None:
    path = rig.root / file
    content = BAD_CONTENT[kind]
    stock = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(content if kind != "syntax-error" else stock + content)
    before = identity(rig.base)
    answer = rig.run("apply")
    check_refusal(answer, 3, Path(file).name)
    assert identity(rig.base) == before
    report = rig.run("--json", "apply")
    assert report.code == report.json["exit"] == 3
    assert report.json["error"]["message"]
    assert report.json["error"]["hint"]
    # Status answers with a plain no, in the same words: it is not refusing anything.
    told = rig.run("--json", "status")
    assert told.code == told.json["exit"] == 1
    assert told.json["error"] == report.json["error"]
    assert told.json["state"] == report.json["state"] == ("missing" if kind == "missing" else BAD)


def test_a_nul_byte_is_named_with_its_line(rig: Rig) -> None:
    path = rig.root / MODEL
    stock = path.read_bytes()
    path.write_bytes(stock + b"X = 1\0\n")
    line = stock.count(b"\n") + 1
    answer = rig.run("apply")
    check_refusal(answer, 3, f"{MODEL} holds a NUL byte (line {line})")
    assert answer.err.splitlines()[-1].startswith("next: reinstall this vLLM")


def test_target_that_is_a_folder(rig: Rig) -> None:
    (rig.root / MTP).unlink()
    (rig.root / MTP).mkdir()
    before = identity(rig.base)
    check_refusal(rig.run("apply"), 3, "mtp.py")
    assert identity(rig.base) == before


@pytest.mark.parametrize("verb", ["status", "apply", "verify", "revert"])
def test_a_pipe_in_place_of_a_patched_file_is_never_opened(rig: Rig, verb: str) -> None:
    assert rig.run("apply").code == 0
    target = rig.root / MODEL
    target.unlink()
    os.mkfifo(target)
    answer = rig.run(verb)
    if verb == "revert":
        assert answer.code == 0
        assert f"{MODEL} is no longer a file" in answer.out + answer.err
    else:
        assert f"{MODEL} is not a regular file" in answer.out + answer.err
        assert answer.code in (1, 3)


def test_a_file_that_the_release_never_had_is_not_missed(tmp_path: Path) -> None:
    rig = make(tmp_path / "rig", known.versions(known.WITHOUT_DSPARK)[-1])
    assert rig.run("apply").code == 0
    answer = rig.run("revert")
    assert answer.code == 0 and "no longer a file" not in answer.out + answer.err
