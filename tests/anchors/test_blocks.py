"""Blocks, plans, receipts and overlays, decision by decision, without parsing a release."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import anchors
from anchors.digests import sha256, staged_digest
from anchors.engine import assess, fences, locate, overlay, plan, receipt, staging
from anchors.engine.fences import Block, Split
from anchors.engine.plan import AnchorState, FilePlan
from anchors.engine.source import Source, target_paths
from anchors.errors import HotfixError
from anchors.kit.anchor import Anchor, Match
from anchors.writing import journal, state

NEWLINES = st.sampled_from(["\n", "\r\n"])


@given(st.lists(st.sampled_from(["a = 1", "", "# é"]), max_size=5), NEWLINES, st.booleans())
def test_blocks_come_and_go_without_a_trace(lines: list[str], newline: str, ends: bool) -> None:
    data = newline.join(lines + [""] * ends).encode()
    places = [(None, "last"), (None, "end"), (0, "first")]
    blocks = [(at, fences.render(name, "x = 1\n\ny = 2")) for at, name in places]
    made = fences.insert(data, blocks)
    parted = fences.split(made)
    assert parted.stock == data
    assert parted.blocks and all(block.intact for block in parted.blocks)
    assert parted.blocks[0].id == "first"
    if b"\n" in data:
        assert (b"\r\n" in made) == (newline == "\r\n")
        assert made.count(b"\r\n") in (0, made.count(b"\n"))


def test_places_are_lines_of_the_file_as_it_was() -> None:
    assert fences.insert(b"1\n2\n3\n", [(1, "a\n"), (2, "b\n")]) == b"1\na\n2\nb\n3\n"


def test_one_odd_line_end_does_not_decide() -> None:
    assert fences.newline_of(b"a\nb\nc\r\n") == "\n"
    assert fences.newline_of(b"a\r\nb\r\nc\n") == "\r\n"
    assert fences.newline_of(b"a\r\nb\n") == "\n"


OPEN, CLOSE, OTHER = b"# >>> vision-exp:a\n", b"# <<< vision-exp:a\n", b"# >>> vision-exp:b\n"


@pytest.mark.parametrize(
    ("data", "broken"),
    [
        (OPEN + b"x\n", "never closed"),
        (CLOSE, "without having been opened"),
        (OPEN + OTHER + CLOSE, "not closed before b opens"),
        (OPEN + b"# <<< vision-exp:b\n", "without having been opened"),
        (OTHER + CLOSE, "without having been opened"),
        ((OPEN + CLOSE) * 2, "present 2 times"),
        (OPEN + CLOSE, ""),
    ],
)
def test_fences_that_are_wrong(data: bytes, broken: str) -> None:
    found = fences.split(data)
    assert broken in found.broken and bool(broken) == bool(found.broken)
    assert found.stock == (data if broken else b"")


def test_a_block_changed_by_hand_is_not_intact() -> None:
    text = fences.render("a", "x = 1")
    assert fences.split(text.encode()).blocks[0].intact
    for number in range(2, 12):  # whichever digest is the greater one
        changed = text.replace("x = 1", f"x = {number}").encode()
        assert not fences.split(changed).blocks[0].intact


def test_what_a_block_says_of_itself() -> None:
    for body in ("x = 1", ""):
        (block,) = fences.split(fences.render("a", body).encode()).blocks
        assert (block.id, block.version, block.intact) == ("a", anchors.__version__, True)
    for other in (OPEN + CLOSE, OPEN + b"x = 1\n" + CLOSE):
        assert fences.split(other).blocks == (Block("a", other.decode(), "", False),)


SITE = Anchor("a", "f.py", "", "", "", "", "", lambda m: None, lambda m, v: "x = 1", ())
MATCH = Match(line=1, indent="")


def located() -> Any:
    return SimpleNamespace(outcomes=((SITE, MATCH),))


def test_a_plan_names_the_stock_bytes_and_the_overlay() -> None:
    digests = {
        plan._digest(overlay, {"f.py": Split(stock, ())}, {"f.py": located()})
        for overlay in ("o", "p")
        for stock in (b"one", b"other")
    }
    assert len(digests) == 4


def test_a_block_that_was_moved_is_not_applied() -> None:
    values = plan.Values(root="/r", overlay="o", plan="p")
    text = fences.render("a", "x = 1").encode()
    for data, wanted in ((b"1\n" + text + b"2\n", "applied"), (b"1\n2\n" + text, "edited")):
        found = plan._file(Source("f.py", data), fences.split(data), located(), (SITE,), values)
        assert [one.state for one in found.anchors] == [wanted]


@pytest.mark.parametrize(
    ("block", "wanted"),
    [
        (None, "pristine"),
        (Block("a", "x", "1", True), "applied"),
        (Block("a", "old", "1", True), "outdated"),
        (Block("a", "old", "1", False), "edited"),
    ],
)
def test_the_state_of_a_block(block: Block | None, wanted: str) -> None:
    assert plan._block_state(block, "x") == wanted


@pytest.mark.parametrize(
    ("states", "before", "wanted"),
    [
        (["drifted", "edited"], {}, "drifted"),
        (["edited", "applied"], {}, "edited"),
        (["pristine", "not-applicable"], {}, "pristine"),
        (["pristine"], {"f0.py": "x"}, "stale"),
        (["applied", "not-applicable"], {}, "applied"),
        (["applied", "pristine"], {}, "mixed"),
        (["applied", "outdated"], {}, "outdated"),
        (["applied"], {"f0.py": sha256(b"s")}, "applied"),
        (["applied"], {"f0.py": sha256(b"another stock")}, "edited"),
    ],
)
def test_the_state_of_a_tree(states: list[str], before: dict[str, Any], wanted: str) -> None:
    files = tuple(
        FilePlan(f"f{n}.py", b"now", b"s", b"now", (AnchorState("a", one),))
        for n, one in enumerate(states)
    )
    assert plan._state(files, (), "", before)[0] == wanted


def test_the_recorded_root_is_one_that_all_hooks_name() -> None:
    def split(root: str) -> Split:
        return Split(b"", (Block("a", f'    root="{root}",\n', "1", True),))

    assert plan.recorded_root([split("/a"), split("/a")]) == "/a"
    assert plan.recorded_root([split("/a"), split("/b")]) is None
    assert plan.recorded_root([Split(b"", ())]) is None


@pytest.mark.parametrize(
    ("optional", "imports", "may"),
    [
        (True, b"", True),
        (False, b"", False),
        (True, b"from .nvidia import mtp", False),
        (True, b"from .nvidia.mtp import X", False),
        (True, b"from .nvidia import mtp2", True),
    ],
)
def test_a_file_that_its_package_imports_must_be_there(
    optional: bool, imports: bytes, may: bool
) -> None:
    site = dataclasses.replace(SITE, file="models/deepseek_v4/nvidia/mtp.py", optional=optional)
    there = ["models/deepseek_v4/nvidia/model.py"]
    assert locate.may_be_absent((site,), imports, there) == may
    # A tree that was built for another platform has nothing of this folder.
    assert locate.may_be_absent((site,), imports, ["models/deepseek_v4/amd/model.py"])


def test_a_newer_tools_block_is_left_alone() -> None:
    later = Block("a", "x", "99.0", True)
    with pytest.raises(HotfixError, match=r"99\.0"):
        plan.refuse_newer({"f.py": Split(b"", (later,))})
    plan.refuse_newer({"f.py": Split(b"", (dataclasses.replace(later, intact=False),))})


GOOD = {
    "schema": 1,
    "tool": {"version": anchors.__version__},
    "plan": "p",
    "files": [{"path": "f.py", "before": None, "after": None, "anchors": []}],
    "overlay": {"root": "/r", "digest": "d"},
    "vllm": {},
    "notes": [],
}


@pytest.mark.parametrize("lost", [None, *GOOD])
def test_a_receipt_without_one_of_its_entries(tmp_path: Path, lost: str | None) -> None:
    path = Path(state.receipt_path(str(tmp_path)))
    path.parent.mkdir()
    path.write_text(json.dumps({k: v for k, v in GOOD.items() if k != lost}))
    found, note = receipt.load(str(tmp_path))
    assert (found is None) == (lost is not None) == bool(note)


@pytest.mark.parametrize("newer", [{"schema": 2}, {"tool": {"version": "99.0"}}])
def test_a_newer_receipt_is_left_alone(tmp_path: Path, newer: dict[str, Any]) -> None:
    path = Path(state.receipt_path(str(tmp_path)))
    path.parent.mkdir()
    path.write_text(json.dumps({**GOOD, **newer}))
    with pytest.raises(HotfixError, match="newer"):
        receipt.load(str(tmp_path))


@pytest.mark.parametrize(
    ("recorded", "staged", "wanted"),
    [
        ("p", "staged", "applied"),
        ("p", "missing", "stale"),
        ("another", "staged", "applied-unrecorded"),
        (None, "staged", "applied-unrecorded"),
    ],
)
def test_an_applied_tree_with_what_lies_beside_it(
    monkeypatch: pytest.MonkeyPatch, recorded: str | None, staged: str, wanted: str
) -> None:
    former = recorded and SimpleNamespace(
        plan=recorded, overlay_root="/r", after={}, judged={}, platform=""
    )
    made = SimpleNamespace(
        state="applied",
        detail="",
        overlay_root="/r",
        former=former,
        digest="p",
        files=(),
        notes=(),
        judged={},
        platform="",
    )
    monkeypatch.setattr(receipt, "load", lambda root: (former, ""))
    monkeypatch.setattr(assess, "make", lambda *_, **__: made)
    monkeypatch.setattr(overlay, "state_of", lambda *_: staged)
    monkeypatch.setattr(journal, "load", lambda root: None)
    target, package = SimpleNamespace(root="/v"), SimpleNamespace(digest="o")
    assert assess._assess_once(target, package, None, True).state == wanted


def test_an_overlay_that_is_not_as_staged_or_that_another_vllm_uses_stays(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    package = root / "vision_exp"
    package.mkdir(parents=True)
    root.chmod(0o755)
    package.chmod(0o755)
    (package / "__init__.py").write_bytes(b"")
    (package / "__init__.py").chmod(0o644)
    shipped = SimpleNamespace(digest="d", files={})
    with pytest.raises(HotfixError, match="not put there by this tool"):
        staging.stage(str(root), str(tmp_path), shipped)
    manifest = Path(staging._manifest_path(str(root)))
    manifest.write_bytes(staging._encode(str(staged_digest(str(package))), ["/v"]))
    assert [tree.files for tree in staging.unstage(str(root), "/v").trees] == [None]
    hooked = other / target_paths()[0]
    hooked.parent.mkdir(parents=True)
    hooked.write_text("# >>> vision-exp:x\n")
    manifest.write_bytes(staging._encode(str(staged_digest(str(package))), ["/v", str(other)]))
    assert not staging.unstage(str(root), "/v").trees
    manifest.write_bytes(staging._encode(str(staged_digest(str(package))), ["/v"]))
    (package / "edited.py").write_bytes(b"by hand")
    found = staging.unstage(str(root), "/v")
    assert not found.trees and "changed since it was staged" in found.notes[0]
