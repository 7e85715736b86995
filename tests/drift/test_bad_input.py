"""Odd wheels, trees and indexes get a line of their own; none takes the run with it."""

from __future__ import annotations

import argparse
import http.server
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hotfix_rig import REPO

from anchors.drift import command
from anchors.drift.trees import Tree
from anchors.errors import HotfixError
from anchors.releases import known

from .conftest import release, run
from .test_matrix import EXPECTED, whole_wheel, words

pytestmark = pytest.mark.xdist_group("drift")
MODEL = "models/deepseek_v4/nvidia/model.py"
RUNNER = "v1/worker/gpu_model_runner.py"
REGISTRY = "model_executor/models/registry.py"


def flagged(content: bytes, flag: int = 0, method: int | None = None) -> bytes:
    """A wheel whose members claim to be encrypted, or packed in another way."""
    out = bytearray(content)
    for start, offset in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        place = content.find(start)
        while place >= 0:
            out[place + offset] |= flag
            if method is not None:
                out[place + offset + 2] = method
            place = content.find(start, place + 1)
    return bytes(out)


def test_odd_wheels(tmp_path: Path) -> None:
    good = whole_wheel(tmp_path, "0.29.0")
    made = {
        "encrypted": flagged(good.read_bytes(), flag=1),
        "method": flagged(good.read_bytes(), method=99),
        "nothing": b"PK\5\6" + bytes(18),
    }
    extra = {
        "file-and-folder": {f"vllm/{MODEL}/x.py": b""},
        "outside": {"vllm/models/deepseek_v4/../../../evil.py": b""},
        "bomb": {"vllm/models/deepseek_v4/bomb.py": bytes(40 << 20)},
    }
    for name, members in extra.items():
        path = tmp_path / f"{name}.whl"
        shutil.copyfile(good, path)
        with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
            for member, data in members.items():
                archive.writestr(member, data)
    for name, content in made.items():
        (tmp_path / f"{name}.whl").write_bytes(content)
    asked = {
        "encrypted": "is encrypted",
        "method": "compression method is not supported",
        "nothing": "no vLLM package in it",
        "file-and-folder": "not a readable wheel",
        "outside": "points outside it",
        "bomb": "too large to be a source file",
    }
    code, result = run(*(str(tmp_path / f"{name}.whl") for name in asked), str(good))
    assert code == 1
    *odd, last = result["trees"]
    for entry, reason in zip(odd, asked.values(), strict=True):
        assert reason in entry["error"]
    assert last["verdict"] == "applies"


def test_odd_trees(tmp_path: Path) -> None:
    folders = {}
    for name in ("folder", "loop", "pipe", "registry", "unary", "brackets"):
        folders[name] = tmp_path / name
        shutil.copytree(release("0.29.0"), folders[name])
    model = {name: folder / "vllm" / MODEL for name, folder in folders.items()}
    for name in ("folder", "loop", "pipe"):
        model[name].unlink()
    model["folder"].mkdir()
    model["loop"].symlink_to("model.py")
    (model["loop"].parent / "inner").symlink_to(".")
    os.mkfifo(model["pipe"])
    runner = folders["pipe"] / "vllm" / RUNNER
    runner.unlink()
    os.mkfifo(runner)
    registry = folders["registry"] / "vllm" / REGISTRY
    registry.unlink()
    os.mkfifo(registry)
    model["unary"].write_text("x = " + "-" * 200_000 + "1\n")
    model["brackets"].write_text("x = " + "(" * 50_000 + ")" * 50_000 + "\n")
    (tmp_path / "circle").symlink_to("circle")
    said = {
        "folder": "no such file",
        "loop": "no such file",
        "pipe": "no such file",
        "registry": "is not a file",
        "unary": "nested too deeply",
        "brackets": "nested too deeply",
        "circle": "no such file, folder or version",
    }
    code, result = run(*(str(tmp_path / name) for name in said), "x" * 5000)
    assert code == 1
    *odd, long = result["trees"]
    assert "cannot be read" in long["error"]
    for entry, reason in zip(odd, said.values(), strict=True):
        hook = [f["found"] for f in entry["findings"] if f["id"] == "model-hook"]
        assert reason in "".join([entry["error"], *hook])


def test_folders_that_may_not_be_read(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(release("0.29.0"), tree)
    closed = tree / "vllm" / "v1" / "worker"
    closed.chmod(0)
    try:
        if os.access(closed, os.R_OK):
            pytest.skip("NOT RUN: this user may read everything")
        code, result = run(str(tree))
    finally:
        closed.chmod(0o755)
    assert code == 1
    assert "cannot be read" in result["trees"][0]["error"]


class WholeFiles(http.server.SimpleHTTPRequestHandler):
    """Serves a folder without ranges, as the simplest index does."""

    asked: list[str] = []

    def log_message(self, format: str, *args: object) -> None:
        self.asked.append(self.path)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "index" / "vllm").mkdir(parents=True)
    whole_wheel(tmp_path / "index" / "vllm", "0.29.0")
    handler = partial(WholeFiles, directory=str(tmp_path / "index"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_an_index_without_ranges_gives_the_whole_wheel(index: str, tmp_path: Path) -> None:
    code, result = run(
        cache=tmp_path / "cache", PIP_INDEX_URL=index, PIP_EXTRA_INDEX_URL="", PIP_NO_CACHE_DIR="1"
    )
    assert code == 0
    assert words(result) == {"0.29.0": EXPECTED["0.29.0"]}
    assert [path for path in WholeFiles.asked if path.endswith(".whl")]


def test_a_report_whose_name_says_another_kind(tmp_path: Path) -> None:
    code, result = run("latest", "--report", str(tmp_path / "repo rt.pdf"))
    assert code == 6
    assert "a report is Markdown or HTML. Nothing was judged." in result["error"]["message"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (".", "it is a folder"),
        ("no folder/r.md", "there is no folder"),
        ("made/r.md/x.md", "there is no folder"),
        ("r.html.gz", "a report is Markdown or HTML"),
        ("r.json", "a report is Markdown or HTML"),
    ],
)
def test_a_report_that_cannot_be_written_is_refused_first(
    tmp_path: Path, name: str, why: str
) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "r.md").touch()
    arguments = argparse.Namespace(report=[str(tmp_path / name)], trees=[])
    with pytest.raises(HotfixError, match="Nothing was judged") as refused:
        command.run(arguments)
    assert (refused.value.exit_code, why in refused.value.message) == (6, True)


def test_a_release_as_people_name_it() -> None:
    code, result = run("v0.28.0", "latest")
    assert code == 0
    assert [tree["tree"] for tree in result["trees"]] == ["0.28.0", known.newest()]


def test_a_tree_that_this_tool_patched_is_judged_by_its_originals(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    shutil.copytree(release("0.29.0"), folder)
    options = ["--root", str(folder / "vllm"), "--overlay-root", str(tmp_path / "overlay")]
    path = "models/deepseek_v4/nvidia/model.py"
    stock = (folder / "vllm" / path).read_bytes()
    command = [sys.executable, str(REPO / "hotfix.py"), *options, "-q", "apply"]
    subprocess.run(command, check=True, env={**os.environ, "HOME": str(tmp_path)})
    assert (folder / "vllm" / path).read_bytes() != stock
    assert Tree("", folder / "vllm").read(path) == stock
    code, result = run(str(folder))
    assert (code, result["state"]) == (0, "applies")
