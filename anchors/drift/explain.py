"""What a drifted anchor's source looks like now: nearest names, and a diff of the scope."""

from __future__ import annotations

import ast
import difflib
import functools
import re
from collections import Counter
from dataclasses import dataclass

from anchors.drift.trees import Tree
from anchors.drift.verdict import RUN_TIME, Finding
from anchors.engine import native, requirements

#: Candidates of a finding.
MOST_CANDIDATES = 4
_MOST_DIFF_LINES = 40
_SAME_BODY = 0.6
_NAME = re.compile(r"[A-Za-z_]\w{3,}")


@dataclass(frozen=True)
class Explanation:
    """`where`: the file of vLLM; `names`: what of it is gone, or what a site looks for in it;
    `candidates`: `path:line: definition`, nearest first; `diff`: against an older release."""

    where: str
    names: tuple[str, ...]
    candidates: tuple[str, ...]
    diff: str


@dataclass(frozen=True)
class _Definition:
    name: str
    line: int
    end: int
    kind: str


def explain(finding: Finding, tree: Tree, good: Tree | None) -> Explanation:
    """Compare `tree` with `good`, the last release where this finding applied (None: unknown)."""
    path, names, folder = finding.file, _NAME.findall(finding.expected), native.PACKAGE
    if finding.id == RUN_TIME:
        # The first alternative is how the newest releases have it.
        need = requirements.parse(finding.expected, finding.file).names[0]
        path = next((file for file in need.files if tree.read(file) is not None), need.files[0])
        names = [name for name in (need.name, need.owner) if name and not name.startswith("__")]
        # Old and new module may lie anywhere, but a class's own members only in it.
        folder = "" if tree.read(path) is None else path.rpartition("/")[0]
    now = tree.read(path)
    then = good.read(path) if good else None
    old, new = _definitions(then), _definitions(now)
    if finding.id == RUN_TIME and need.owner and need.owner not in {d.name for d in new}:
        names = [need.owner]  # the class is gone: its members say nothing
    # The fact's own nouns ("class", "import") are no names of the source.
    wanted = [name for name in names if name in {d.name for d in old}] or names
    old_scopes = [d for d in old if d.name in wanted]
    alike = {d.name: _alike(d, then, new, now) for d in old_scopes}
    candidates = [
        f"{path}:{d.line}: {d.kind} {d.name} (its body is nearly the same)"
        for name, d in alike.items()
        if d and d.name != name
    ]
    if not any(d.name in wanted for d in new):
        candidates += _elsewhere(tree, folder, path, wanted)
    sought = tuple(candidates)
    near = _near(path, wanted, new, now)
    candidates += [one for one in near if not any(first.startswith(one) for first in sought)]
    diff = ""
    if good and old_scopes and now is not None:  # of a file that is gone no line is news
        scope = min(old_scopes, key=lambda d: d.end - d.line)
        diff = _diff(path, good.label, _text(then, scope), _text(now, alike[scope.name]))
    return Explanation(path, tuple(names), tuple(dict.fromkeys(candidates))[:MOST_CANDIDATES], diff)


@functools.lru_cache(maxsize=100)
def _definitions(data: bytes | None) -> list[_Definition]:
    try:
        tree = ast.parse(data or b"")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found: list[_Definition] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            kind = "class" if isinstance(node, ast.ClassDef) else "def"
            found.append(_Definition(node.name, node.lineno, node.end_lineno or node.lineno, kind))
        # Expressions, most of a file, define nothing.
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, part, ())
            waiting += inner if isinstance(inner, list) else ()
    return sorted(found, key=lambda definition: definition.line)


def _near(path: str, wanted: list[str], new: list[_Definition], data: bytes | None) -> list[str]:
    found: list[str] = []
    for name in wanted:
        close = difflib.get_close_matches(name, {d.name for d in new}, n=2, cutoff=0.6)
        found += [f"{path}:{d.line}: {d.kind} {d.name}" for d in new if d.name in close]
        if not close:
            lines = (data or b"").decode("utf-8", "replace").splitlines()
            found += [
                f"{path}:{number}: {line.strip()[:100]}"
                for number, line in enumerate(lines, 1)
                if re.search(rf"\b{name}\b", line)
            ][:2]
    return list(dict.fromkeys(found))


def _elsewhere(tree: Tree, folder: str, path: str, wanted: list[str]) -> list[str]:
    """Definitions of the wanted names in other files of a folder of the tree."""
    if tree.root is None:
        return []
    mentions = re.compile(rf"\b(class|def) ({'|'.join(wanted)})\b".encode())
    found = []
    beside = (tree.root / path).parent
    files = (tree.root / folder).rglob("*.py")
    for file in sorted(files, key=lambda file: (file.parent != beside, file)):
        place = file.relative_to(tree.root).as_posix()
        data = None if place == path else tree.read(place)
        if data and mentions.search(data):
            found += [
                f"{place}:{d.line}: {d.kind} {d.name}"
                for d in _definitions(data)
                if d.name in wanted
            ]
    return found


def _alike(
    old: _Definition, then: bytes | None, new: list[_Definition], now: bytes | None
) -> _Definition | None:
    """Where `old` is now: under its name, else the definition that shares most of its lines."""
    same = [d for d in new if d.name == old.name and d.kind == old.kind]
    if same:
        return same[0]
    lines = Counter(line.strip() for line in _text(then, old)[1:])

    def share(candidate: _Definition) -> float:
        other = Counter(line.strip() for line in _text(now, candidate)[1:])
        return (lines & other).total() / max(lines.total(), other.total(), 1)

    rivals = [d for d in new if d.kind == old.kind]
    best = max(rivals, key=share, default=None)
    return best if best and share(best) >= _SAME_BODY else None


def _diff(path: str, label: str, then: list[str], now: list[str]) -> str:
    """Unified diff of one scope, shortened."""
    lines = list(
        difflib.unified_diff(then, now, f"{label}/{path}", f"now/{path}", lineterm="", n=2)
    )
    if len(lines) > _MOST_DIFF_LINES:
        rest = len(lines) - _MOST_DIFF_LINES
        lines = [*lines[:_MOST_DIFF_LINES], f"... {rest} more lines"]
    return "\n".join(lines)


def _text(data: bytes | None, definition: _Definition | None) -> list[str]:
    if definition is None:
        return []
    lines = (data or b"").decode("utf-8", "replace").splitlines()
    return lines[definition.line - 1 : definition.end]
