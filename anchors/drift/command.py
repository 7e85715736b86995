"""`hotfix.py drift`: judge trees, add causes and history, report."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from anchors import report
from anchors.digests import TOOL_ROOT, sha256, tool_digest
from anchors.drift import causes, explain, kernels, pages, trees, webpage
from anchors.drift.causes import Entry
from anchors.drift.trees import Cache, Tree
from anchors.drift.verdict import (
    APPLIES,
    DRIFTED,
    RUN_TIME,
    SUPERSEDED,
    Assessment,
    Finding,
    assess,
)
from anchors.engine import requirements
from anchors.engine.requirements import Requirement
from anchors.errors import DONE, NO, HotfixError, environment
from anchors.kit.anchor import Anchor
from anchors.releases.wheels import WheelError
from anchors.report import Report
from anchors.sites import all_anchors

VERIFIED = Path(TOOL_ROOT) / "anchors" / "verified.json"
_REPORT_HINT = "name a file in a folder that exists and is yours"
_RELEASE = re.compile(r"\d+(\.\d+)+")


def run(arguments: argparse.Namespace) -> Report:
    """Judge what was asked for. Raises HotfixError (exit 6): no index and nothing cached."""
    try:
        _refuse_odd_names(arguments.report or ())
        report.say(arguments, f"judging {', '.join(arguments.trees) or 'every release'}")
        say = partial(report.say, arguments)
        named = [name for name in arguments.trees if not kernels.is_meant(name)]
        others = [name for name in arguments.trees if kernels.is_meant(name)]
        entries, notes = assess_all(named, say) if named or not others else ([], [])
        beside, more = _flashinfers(others, say) if others or not named else ([], [])
    except WheelError as error:
        raise environment(
            "no-index",
            f"the package index cannot be read and no release is cached: {error}. "
            "Nothing was judged.",
            hint=error.hint or "name wheels or folders: python3 hotfix.py drift PATH",
        ) from error
    result = report.blank()
    worst = {entry["verdict"] for entry in entries + beside}
    result.update(
        verb="drift",
        state="error" if "error" in worst else DRIFTED if DRIFTED in worst else APPLIES,
        exit=NO if worst & {"error", DRIFTED} else DONE,
        anchors=[anchor.id for anchor in all_anchors()],
        date=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        trees=entries,
        flashinfer=beside,
        notes=notes + more,
        next=_next(arguments.trees, worst),
    )
    quiet = arguments.quiet and result["exit"] == DONE
    result["text"] = "" if quiet else pages.terminal(result)
    for path in arguments.report or ():
        _write(Path(path), webpage.html(result) if _is_page(path) else pages.markdown(result))
    if arguments.write_verified:
        _write(VERIFIED, verified(entries))
    return result


def assess_all(
    named: Sequence[str], say: Callable[[str], None] = lambda words: None
) -> tuple[list[Entry], list[str]]:
    """What was found out about each tree, and notes; every release of the index if none is named.

    `say` is told of every tree that was really judged, since each takes a second or two.
    Raises WheelError: no index and nothing cached.
    """
    needs = requirements.collect(str(Path(TOOL_ROOT) / "vision_exp"))
    cache = Cache(trees.default_cache())
    verdicts = _Verdicts(cache.folder / "verdicts", all_anchors(), needs, say)
    with trees.collect(named, cache) as (found, notes):
        assessed = [verdicts.of(tree) for tree in found]
        entries = [
            _entry(tree, one, _last_good(place, found, assessed, cache, verdicts))
            for place, (tree, one) in enumerate(zip(found, assessed, strict=True))
        ]
    return entries, notes


def _next(named: Sequence[str], worst: set[str]) -> str:
    """What to do about the worst that was found, "" where all fit."""
    if DRIFTED in worst:
        again = shlex.join(["python3", "hotfix.py", "drift", *named])
        return f"mend what each finding names (docs/new-release.md), then: {again}"
    if "error" in worst:
        return "name a release, a wheel or a folder with vLLM in it: python3 hotfix.py drift latest"
    return ""


def _flashinfers(named: list[str], say: Callable[[str], None]) -> tuple[list[Entry], list[str]]:
    """FlashInfer's entries, and notes; every release of the index if none is named.

    Raises WheelError where one that was named cannot be found.
    """
    cache = Cache(trees.default_cache())
    try:
        return kernels.judge(named or ["flashinfer"], cache, say), []
    except WheelError as error:
        if named:
            raise
        kept = kernels.cached(cache)
        return kept, [f"FlashInfer's releases are not known ({error}): judged {len(kept)} cached"]


def _is_page(path: str) -> bool:
    return Path(path).suffix.lower() in (".html", ".htm")


def _refuse_odd_names(paths: Sequence[str]) -> None:
    """Before judging, which takes a while: reports that cannot be written as they are named.

    Raises HotfixError (exit 6).
    """
    for path in paths:
        name, folder = Path(path), Path(path).parent
        if name.suffix.lower() not in ("", ".md", ".markdown", ".txt", ".html", ".htm"):
            raise environment(
                "report-kind",
                f"{path}: a report is Markdown or HTML. Nothing was judged.",
                hint=f"--report {shlex.quote(name.stem)}.md, or .html",
            )
        why = "it is a folder" if name.is_dir() else ""
        if not folder.is_dir():
            why = f"there is no folder {folder}"
        elif not why and not os.access(name if name.exists() else folder, os.W_OK):
            why = "this user may not write there"
        if why:
            raise environment(
                "report-not-written",
                f"{path} cannot be written: {why}. Nothing was judged.",
                hint=_REPORT_HINT,
            )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HotfixError(
            "report-not-written",
            f"{path} cannot be written: {error.strerror}. The trees were judged.",
            exit_code=6,
            hint=_REPORT_HINT,
        ) from error


class _Verdicts:
    """Verdicts of released trees, kept for as long as this tool and its needs stay the same."""

    def __init__(
        self,
        folder: Path,
        anchors: tuple[Anchor, ...],
        needs: tuple[Requirement, ...],
        say: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._say = say
        self._anchors = anchors
        self._needs = needs
        self._tool = sha256(json.dumps([tool_digest(), [n.text for n in needs]]).encode())[:16]

    def of(self, tree: Tree) -> Assessment:
        """The verdict, from the cache where the tree is a release that was judged before."""
        place = self._folder / f"{tree.fixed}-{self._tool}.json"
        if tree.fixed and place.is_file():
            try:
                kept = json.loads(place.read_text(encoding="utf-8"))
                return Assessment(tree.label, tuple(Finding(**one) for one in kept))
            except (ValueError, TypeError):
                place.unlink(missing_ok=True)
        fresh = assess(tree, self._anchors, self._needs)
        self._say(f"judged {tree.label}")
        if tree.fixed and not fresh.error:
            self._folder.mkdir(parents=True, exist_ok=True)
            scratch = place.with_suffix(".new")
            scratch.write_text(json.dumps([asdict(f) for f in fresh.findings]), encoding="utf-8")
            scratch.replace(place)
        return fresh


def _last_good(
    place: int, found: list[Tree], assessed: list[Assessment], cache: Cache, verdicts: _Verdicts
) -> causes.Good:
    """Drifted finding -> (the last release where it applied, the first release since where not).

    Releases are judged from the newest back, as far as one finding is still looked for.
    """
    sought = [f for f in assessed[place].findings if f.verdict == DRIFTED]
    earlier: Iterator[tuple[Tree, Assessment]]
    if _RELEASE.fullmatch(found[place].label):
        earlier = zip(reversed(found[:place]), reversed(assessed[:place]), strict=True)
    else:
        kept = map(cache.tree, reversed(cache.versions()))
        earlier = ((tree, verdicts.of(tree)) for tree in kept)
    since = dict.fromkeys(sought, found[place].label)
    good: causes.Good = {}
    while sought and (release := next(earlier, None)):
        tree, one = release
        for finding in sought:
            state = _state(one, finding)
            if state == APPLIES:
                good[finding] = (tree, since[finding])
            elif state == DRIFTED:
                since[finding] = tree.label
        sought = [finding for finding in sought if finding not in good]
    return good


def _state(assessed: Assessment, finding: Finding) -> str:
    """The verdict of the same anchor in another tree, of the same requirement for `run-time`."""
    same = [f for f in assessed.findings if f.id == finding.id]
    states = {f.verdict for f in same if f.id != RUN_TIME or f.expected == finding.expected}
    if finding.id == RUN_TIME and not states:
        # Only the requirements that a tree does not meet are listed one by one.
        states = {APPLIES if f.verdict == DRIFTED else f.verdict for f in same}
    return states.pop() if states else ""


def _entry(tree: Tree, assessed: Assessment, good: causes.Good) -> Entry:
    return {
        "tree": assessed.label,
        "verdict": assessed.verdict,
        "error": assessed.error,
        "findings": causes.entries(assessed.findings, tree, good, explain.explain),
    }


def verified(entries: list[Entry]) -> str:
    """anchors/verified.json: per anchor, the releases where it was seen to apply, and so on."""
    table: dict[str, dict[str, list[str]]] = {}
    for entry in entries:
        if not _RELEASE.fullmatch(entry["tree"]):
            continue
        for column, state in causes.row(entry).items():
            table.setdefault(column, {}).setdefault(state, []).append(entry["tree"])
    native = sorted({e["tree"] for e in entries if e["verdict"] == SUPERSEDED})
    return json.dumps({"anchors": table, "native": native}, indent=1) + "\n"
