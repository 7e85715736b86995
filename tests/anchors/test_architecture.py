"""Dependencies point one way, and nothing of the machine it was made on is in the repository."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from repository import tracked

from anchors.drift import documents
from anchors.engine.versions import version_key
from anchors.releases import known

REPO = Path(__file__).resolve().parents[2]
STANDARD = set(sys.stdlib_module_names) | {"__future__"}
# Optional: only for checking releases over the network, imported where it is used.
WHEEL_READERS = {"remotezip", "requests"}


def modules(folder: str) -> list[Path]:
    return sorted((REPO / folder).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Absolute dotted names that a module imports, wherever in it."""
    found: set[str] = set()
    package = path.relative_to(REPO).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level] if node.level else ()
            stem = ".".join([*base, *([node.module] if node.module else [])])
            found.update([stem, *(f"{stem}.{alias.name}" for alias in node.names)])
    return found


def reaches(path: Path, *packages: str) -> set[str]:
    wanted = tuple(packages)
    return {n for n in imports(path) if n in wanted or n.startswith(tuple(f"{p}." for p in wanted))}


def test_command_line_uses_the_engine_only() -> None:
    path = REPO / "hotfix.py"
    assert not reaches(path, "anchors.sites", "vision_exp")
    outside = {name.split(".")[0] for name in imports(path)} - STANDARD
    assert outside <= {"anchors"}


@pytest.mark.parametrize("path", modules("anchors"), ids=lambda p: str(p.relative_to(REPO)))
def test_anchors_need_the_standard_library_and_libcst(path: Path) -> None:
    outside = {name.split(".")[0] for name in imports(path)} - STANDARD
    allowed = {"anchors", "libcst"} | (WHEEL_READERS if path.name == "wheels.py" else set())
    assert outside <= allowed
    assert not reaches(path, "vision_exp", "hotfix", "vllm", "torch")


#: Rooms of the patcher, lowest first: arrows lead down, or stay in their room.
LAYERS = (
    ("__init__", "errors", "digests", "report", "bundled"),
    ("kit",),
    ("sites",),
    ("writing",),
    ("engine",),
    ("releases",),
    ("drift", "doctor"),
    ("verbs",),
    ("cli", "hotfix"),
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
PATCHER = [REPO / "hotfix.py", *modules("anchors")]


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__")


MODULES = {dotted(path): path for path in PATCHER}


def arrows(path: Path) -> set[str]:
    """The patcher's own modules that one of them imports, also inside of functions."""
    return {name for name in imports(path) if name in MODULES} - {dotted(path), "anchors"}


def room(module: str) -> str:
    parts = module.split(".")
    return parts[0] if module == "hotfix" else parts[1] if len(parts) > 1 else "__init__"


def test_every_room_has_its_layer() -> None:
    assert {room(module) for module in MODULES} == set(LEVEL)
    assert len([p for p in (REPO / "anchors").iterdir() if p.name != "__pycache__"]) <= 16


@pytest.mark.parametrize("path", PATCHER, ids=lambda p: str(p.relative_to(REPO)))
def test_arrows_lead_down(path: Path) -> None:
    here = room(dotted(path))
    for other in map(room, arrows(path)):
        assert other == here or LEVEL[other] < LEVEL[here] or here == "hotfix", other
        assert other not in ("kit", "sites") or here != "writing"


def test_no_circles() -> None:
    graph = {module: arrows(path) for module, path in MODULES.items()}
    while graph:
        ends = [module for module, targets in graph.items() if not targets & graph.keys()]
        assert ends, f"a circle is among {sorted(graph)}"
        for module in ends:
            del graph[module]


@pytest.mark.parametrize(
    ("name", "maker"),
    [
        ("VerifiedPlan", "anchors.engine.prove"),  # a plan that was proven
        ("Job", "anchors.verbs.commit"),  # what such a plan writes
        ("perform", "anchors.verbs.commit"),  # and the writing of it
    ],
)
def test_nothing_unproven_is_written(name: str, maker: str) -> None:
    def calls(path: Path) -> bool:
        called = [n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        names = {getattr(f, "id", None) or getattr(f, "attr", None) for f in called}
        return name in names

    assert [module for module, path in MODULES.items() if calls(path)] == [maker]


def test_paths_of_the_notes_are_spelled_in_one_place() -> None:
    words = {".vision-exp", "receipt.json", "journal.json", "undo", "originals"}
    for module, path in MODULES.items():
        constants = [
            n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)
        ]
        found = {n.value for n in constants if isinstance(n.value, str)} & words
        assert found == (words if module == "anchors.writing.state" else set()), module


@pytest.mark.parametrize("path", PATCHER, ids=lambda p: str(p.relative_to(REPO)))
def test_no_module_is_long(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 300


@pytest.mark.parametrize("path", modules("vision_exp"), ids=lambda p: p.name)
def test_overlay_stands_alone(path: Path) -> None:
    assert not reaches(path, "anchors", "hotfix", "tests")


def test_reading_the_command_line_does_not_load_the_locator() -> None:
    probe = "import sys, hotfix; sys.exit('libcst' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], cwd=REPO).returncode == 0


def test_no_index_host_and_no_path_of_a_machine() -> None:
    # Spelled in pieces, so that this file does not find itself.
    hosts = ["py" + "pi.org", "python" + "hosted", "py" + "thon.org/simple", "anaconda" + ".org"]
    paths = ["/wo" + "rk/main", "/wo" + "rk/shared", "/fa" + "rm/", "/tm" + "p/w/", "/ho" + "me/"]
    pattern = re.compile("|".join(map(re.escape, [*hosts, *paths])))
    found = []
    for path in tracked():
        if path.is_file():
            text = path.read_text(errors="replace")
            found += [f"{path.relative_to(REPO)}: {hit.group()}" for hit in pattern.finditer(text)]
    assert not found


def test_no_source_of_vllm_is_committed() -> None:
    mark = "Copyright contributors to the " + "vLLM project"
    assert not [p for p in tracked() if p.is_file() and mark in p.read_text(errors="replace")]


def test_what_documents_say_of_sites_and_releases_is_in_step() -> None:
    anchors = json.loads((REPO / "anchors/verified.json").read_text())["anchors"]
    applies = {id_: found.get("applies", []) for id_, found in anchors.items()}
    files = {documents.REFERENCE, *(sentence.file for sentence in documents.sentences())}
    assert documents.README in files
    for file in files:
        text = (REPO / file).read_text()
        assert documents.rendered(file, text, applies) == text, "python3 -m anchors.drift.update"


RELEASE = re.compile(r"\b0\.[23]\d\.\d\b")
# Where a release is named for what it is, and stays so when there are newer ones.
NAMES_RELEASES = ("anchors/releases/known.py", "anchors/sites/", "tests/support/native_image.py")


def test_releases_are_named_in_one_place() -> None:
    sources = [*modules("anchors"), *modules("tests/support"), *(REPO / ".github").rglob("*.yml")]
    found = []
    for path in (*sources, REPO / "run.sh", REPO / "hotfix.py", REPO / "tests" / "run.sh"):
        file = path.relative_to(REPO).as_posix()
        text = path.read_text()
        for sentence in documents.sentences():
            text = re.sub(sentence.words, "", text) if sentence.file == file else text
        if not file.startswith(NAMES_RELEASES):
            found += [f"{file}: {hit.group()}" for hit in RELEASE.finditer(text)]
    assert found == []


def test_known_releases_are_in_order_and_named_once() -> None:
    keys = [version_key(version) for version in known.versions()]
    assert keys == sorted(set(keys))
