"""Located -> Plan: what every file is now, what it must become, and what state that makes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from anchors import __version__
from anchors.digests import sha256
from anchors.engine import fences, native, platforms, requirements
from anchors.engine.fences import Block, Split
from anchors.engine.locate import Located, locate, may_be_absent
from anchors.engine.overlay import Package, default_root
from anchors.engine.reading import Reading
from anchors.engine.receipt import Receipt
from anchors.engine.source import Source, read
from anchors.engine.target import Target
from anchors.engine.versions import is_newer
from anchors.errors import refused
from anchors.kit.anchor import Anchor, Drift, Match, NotApplicable, Values

_ROOT = re.compile(r'^\s*root=(".*"),$', re.MULTILINE)
_INIT = f"{native.PACKAGE}/__init__.py"
_MOST_NAMED = 3


@dataclass(frozen=True)
class AnchorState:
    """One anchor's state in the tree, and why."""

    id: str
    state: str
    detail: str = ""


@dataclass(frozen=True)
class FilePlan:
    """One target file: bytes now, without our blocks, and as they must become."""

    path: str
    current: bytes | None
    stock: bytes | None
    after: bytes | None
    anchors: tuple[AnchorState, ...]
    located: Located | None = None


@dataclass(frozen=True)
class Plan:
    """What the whole tree is, and what it must become.

    `digest` is the same on every machine with the same vLLM and this tool. `overlay` is what is
    to lie in `overlay_root`, None where it is taken away; `former` is the receipt found. `judged`
    are the digests of the other files that the state rests on, `platform` what the vLLM is for.
    """

    target: Target
    state: str
    detail: str
    digest: str
    overlay_root: str
    overlay: Package | None
    former: Receipt | None
    files: tuple[FilePlan, ...]
    notes: tuple[str, ...] = ()
    judged: Mapping[str, str | None] = field(default_factory=dict)
    platform: str = ""

    @property
    def edits(self) -> tuple[FilePlan, ...]:
        """The files whose bytes change."""
        return tuple(file for file in self.files if file.current != file.after)


def make(
    target: Target,
    anchors: tuple[Anchor, ...],
    overlay: Package,
    *,
    overlay_root: str | None,
    former: Receipt | None,
    trust_receipt: bool,
) -> Plan:
    """Plans the tree, with the overlay in `overlay_root`, None where the one in use is meant.

    Without `trust_receipt` what `former` says of the bytes before patching counts for nothing.
    Raises HotfixError for files that cannot be read or parsed at all.
    """
    paths = list(dict.fromkeys(anchor.file for anchor in anchors))
    sources = {path: read(target.root, path) for path in paths}
    splits = {path: fences.split(source.data or b"") for path, source in sources.items()}
    overlay_root = overlay_root or recorded_root(splits.values())
    overlay_root = overlay_root or default_root(target.root)
    platform = platforms.of(target.root)
    reading = Reading(target.root, {path: splits[path].stock for path in paths})
    verdict = native.assess(target.root, reading.read, platform)
    early = _without_locating(target, anchors, sources, splits, verdict, platform.folder)
    if early:
        files = _untouched(sources, splits)
        return Plan(target, *early, "", overlay_root, overlay, former, files)
    refuse_newer(splits)
    located = {
        path: locate(path, splits[path].stock, _of(anchors, path))
        for path in paths
        if sources[path].data is not None
    }
    digest = _digest(overlay.digest, splits, located)
    values = Values(root=overlay_root, overlay=overlay.digest, plan=digest)
    files = tuple(
        _file(sources[path], splits[path], located.get(path), _of(anchors, path), values)
        for path in paths
    )
    needs = requirements.answer(requirements.stated(overlay.files), reading.read)
    before = former.before if former and trust_receipt else {}
    state, detail = _state(files, needs.lost, verdict.detail if verdict else "", before)
    return Plan(
        target,
        state,
        detail,
        digest,
        overlay_root,
        overlay,
        former,
        files,
        (*platforms.notes(target.root, native.PACKAGE, platform), *requirements.notes(needs)),
        reading.digests,
        platform.name,
    )


def _of(anchors: tuple[Anchor, ...], path: str) -> tuple[Anchor, ...]:
    return tuple(anchor for anchor in anchors if anchor.file == path)


def _untouched(sources: dict[str, Source], splits: dict[str, Split]) -> tuple[FilePlan, ...]:
    return tuple(
        FilePlan(path, source.data, source.data and splits[path].stock, source.data, ())
        for path, source in sources.items()
    )


def recorded_root(splits: Iterable[Split]) -> str | None:
    """The overlay root that hooks in the tree point to, where they agree."""
    roots = {
        json.loads(found)
        for split in splits
        for block in split.blocks
        for found in _ROOT.findall(block.text)
    }
    return str(roots.pop()) if len(roots) == 1 else None


def _without_locating(
    target: Target,
    anchors: tuple[Anchor, ...],
    sources: dict[str, Source],
    splits: dict[str, Split],
    verdict: native.Verdict | None,
    folder: str,
) -> tuple[str, str] | None:
    """States that need no LibCST: nothing there, files missing, fences wrong, not ours."""
    init = os.path.join(target.root, _INIT)
    absent = [path for path, source in sources.items() if source.data is None]
    own = f"{native.PACKAGE}/{folder}"
    served = [path for path in sources if path.startswith(f"{own}/")]
    if not os.path.isfile(init) or set(served) <= set(absent):
        return "not-applicable", f"no DeepSeek-V4 for {folder.upper()} in this vLLM ({own})"
    broken = {path: split.broken for path, split in splits.items() if split.broken}
    if broken:
        return "mixed", "; ".join(f"{path}: {why}" for path, why in broken.items())
    if verdict and verdict.state != "drifted":
        ours = any(split.blocks for split in splits.values())
        if ours and verdict.state != "not-applicable":
            return "mixed", f"blocks of this hotfix in a vLLM where {verdict.detail}"
        return verdict.state, verdict.detail
    with open(init, "rb") as file:
        imports = file.read()
    there = set(sources) - set(absent)
    for path in absent:
        if not may_be_absent(_of(anchors, path), imports, there):
            return "missing", f"{path} is missing"
    return None


def refuse_newer(splits: Mapping[str, Split]) -> None:
    """Raises HotfixError (exit 3) if a newer version of this tool wrote one of the blocks."""
    for path, split in splits.items():
        for block in split.blocks:
            if block.intact and is_newer(block.version):
                raise refused(
                    "newer-tool",
                    f"{path} was patched by vision-exp {block.version}, this is {__version__}; "
                    "a newer one's work is not undone. Nothing was changed.",
                    hint=f"use vision-exp {block.version} or later",
                    state="outdated",
                )


def _digest(overlay: str, splits: dict[str, Split], located: dict[str, Located]) -> str:
    values = Values(root="", overlay=overlay, plan="")
    content = []
    for path, file in sorted(located.items()):
        bodies = [
            [anchor.id, sha256(anchor.render(outcome, values).encode())]
            for anchor, outcome in file.outcomes
            if isinstance(outcome, Match) and anchor.render
        ]
        if bodies:
            content.append([path, sha256(splits[path].stock), bodies])
    return sha256(json.dumps([overlay, content]).encode())


def _file(
    source: Source,
    split: Split,
    located: Located | None,
    anchors: tuple[Anchor, ...],
    values: Values,
) -> FilePlan:
    if located is None:
        states = tuple(
            AnchorState(anchor.id, "not-applicable", "this release has no such file")
            for anchor in anchors
        )
        return FilePlan(source.path, None, None, None, states)
    present = {block.id: block for block in split.blocks}
    inserts: list[tuple[int | None, str]] = []
    found = []
    for anchor, outcome in located.outcomes:
        if isinstance(outcome, Drift):
            found.append(AnchorState(anchor.id, "drifted", f"{outcome.kind}: {outcome}"))
        elif isinstance(outcome, NotApplicable) or anchor.render is None:
            found.append(AnchorState(anchor.id, "not-applicable", str(outcome)))
        else:
            text = fences.render(anchor.id, anchor.render(outcome, values), outcome.indent)
            inserts.append((outcome.line, text))
            state = _block_state(present.get(anchor.id), text)
            detail = "its block was changed by hand" if state == "edited" else _place(outcome)
            found.append(AnchorState(anchor.id, state, detail))
    after = fences.insert(split.stock, inserts)
    known = {state.id for state in found}
    for block in split.blocks:
        if block.id not in known:
            found.append(AnchorState(block.id, "outdated" if block.intact else "edited"))
    if after != source.data and found and all(s.state == "applied" for s in found):
        found = [AnchorState(s.id, "edited", "moved from where it belongs") for s in found]
    return FilePlan(source.path, source.data, split.stock, after, tuple(found), located)


def _place(found: Match) -> str:
    """Where in the released file the block belongs, which `-v` shows."""
    return "at the end" if found.line is None else f"after line {found.line}"


def _block_state(block: Block | None, text: str) -> str:
    if block is None:
        return "pristine"
    if block.text == text:
        return "applied"
    return "outdated" if block.intact else "edited"


def _state(
    files: tuple[FilePlan, ...],
    lost: tuple[requirements.Missing, ...],
    elsewhere: str,
    before: Mapping[str, str | None],
) -> tuple[str, str]:
    states = [(file.path, anchor) for file in files for anchor in file.anchors]
    for wanted in ("drifted", "edited"):
        named = [f"{a.id} in {path}: {a.detail}" for path, a in states if a.state == wanted]
        if wanted == "drifted" and not named:  # what a site misses says most
            named = [elsewhere] * bool(elsewhere)
            named += [f"{one.need}: {one.found}" for one in lost[:_MOST_NAMED]]
            more = len(lost) - _MOST_NAMED
            named += [f"and {more} more: hotfix.py drift names all"] if more > 0 else []
        if named:
            return wanted, "; ".join(named)
    here = {anchor.state for _, anchor in states} - {"not-applicable"}
    if here == {"pristine"}:
        if before:
            return "stale", "a receipt says applied, but vLLM was installed again since"
        return "pristine", ""
    for file in files:
        known = before.get(file.path)
        if known and file.current != file.stock and sha256(file.stock or b"") != known:
            return "edited", f"{file.path} was changed outside our blocks since it was patched"
    if "outdated" in here:
        return "outdated", "an earlier build of this tool, or another overlay, was applied"
    if here == {"applied"}:
        return "applied", ""
    absent = [anchor.id for _, anchor in states if anchor.state == "pristine"]
    return "mixed", f"applied in part: {', '.join(absent)} not applied"
