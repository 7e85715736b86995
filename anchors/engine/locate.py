"""Source -> Located: LibCST finds the anchors of one file; the file is parsed once."""

from __future__ import annotations

import ast
import atexit
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

from anchors import bundled
from anchors.digests import TOOL_ROOT
from anchors.engine import follow, native
from anchors.engine.source import REINSTALL_HINT, decode
from anchors.errors import HotfixError, environment, refused
from anchors.kit.anchor import Anchor, Drift, Match, NotApplicable

Outcome = Match | Drift | NotApplicable
_DEEPEST = 250


@dataclass(frozen=True)
class Located:
    """What LibCST says about a file's anchors; `text` is the source without a BOM."""

    path: str
    outcomes: tuple[tuple[Anchor, Outcome], ...]


def may_be_absent(anchors: tuple[Anchor, ...], imports: bytes, there: Iterable[str]) -> bool:
    """Whether a release may lack the file of these anchors; not where its package imports it.

    `there`: the target files that the tree has. One that was built for one platform may lack the
    other's folder; `native` says whether its own is there.
    """
    folder = anchors[0].file.rpartition("/")[0]
    if folder in native.PATCHED and not any(path.startswith(f"{folder}/") for path in there):
        return True
    module = anchors[0].file.removesuffix(".py")
    imported = follow.imported(f"{native.PACKAGE}/__init__.py", imports)
    return all(a.optional for a in anchors) and module not in imported


# A run assesses the same bytes before and under the lock, and its own result afterwards.
@lru_cache(maxsize=64)
def locate(path: str, data: bytes, anchors: tuple[Anchor, ...]) -> Located:
    """Looks for `anchors` in a file's stock bytes.

    Raises HotfixError: not Python (3), LibCST missing (6).
    """
    text = decode(path, data)
    if data.count(b"\r") - data.count(b"\r\n") > data.count(b"\n"):
        raise refused(
            "target-line-ends",
            f"{path} has lines that end in a carriage return alone, as no vLLM ships them. "
            "Nothing was changed.",
            hint=REINSTALL_HINT,
            state="drifted",
        )
    _parseable(path, text)
    cst = load_libcst()
    with _failures_of_libcst(path):
        module = cst.parse_module(text)
    outcomes: list[tuple[Anchor, Outcome]] = []
    for anchor in anchors:
        try:
            with _failures_of_libcst(path):
                outcomes.append((anchor, anchor.find(module)))
        except (Drift, NotApplicable) as outcome:
            outcomes.append((anchor, outcome))
    return Located(path, tuple(outcomes))


@contextmanager
def _failures_of_libcst(path: str) -> Iterator[None]:
    """Whatever LibCST fails with is a judgement about the file. Raises HotfixError (exit 3).

    Python has taken the file before. A panic of LibCST's native parser is no Exception.
    """
    try:
        yield
    except (Drift, NotApplicable, KeyboardInterrupt, SystemExit):
        raise
    except RecursionError as error:  # LibCST nests what Python's own tree holds as one node
        raise _too_deep(path) from error
    except BaseException as error:
        words = " ".join(str(error).split())[:100]
        raise refused(
            "target-libcst",
            f"LibCST cannot take {path}, which Python can ({type(error).__name__}: {words}). "
            "Nothing was changed.",
            hint="report this with the file; a newer LibCST may take it: "
            "python3 -m pip install --upgrade libcst",
            state="drifted",
        ) from error


def _parseable(path: str, text: str) -> None:
    """Raises HotfixError (exit 3) for code that this Python does not take, or LibCST cannot.

    LibCST's time grows with the square of the nesting, and at some depth its parser takes the
    process with it. The deepest file of any vLLM has 30 levels.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (RecursionError, MemoryError) as error:
        raise _too_deep(path) from error
    except (SyntaxError, ValueError) as error:
        if "too many nested" in str(error):
            raise _too_deep(path) from error
        raise _syntax(path, getattr(error, "lineno", None)) from error
    if _depth_exceeds(tree, _DEEPEST):
        raise _too_deep(path)


def _depth_exceeds(tree: ast.AST, limit: int) -> bool:
    """Whether LibCST would nest `tree` deeper. By hand: `iter_child_nodes` takes twice as long."""
    waiting: list[tuple[ast.AST, int]] = [(tree, 1)]
    while waiting:
        node, depth = waiting.pop()
        # `a and b and c` is one node here, and two inside each other in LibCST.
        depth += len(node.values) if isinstance(node, ast.BoolOp) else 1
        if depth > limit:
            return True
        for value in vars(node).values():
            if value.__class__ is list:
                waiting += [(child, depth) for child in value if isinstance(child, ast.AST)]
            elif isinstance(value, ast.AST) and value._fields:  # not Load, Add and the like
                waiting.append((value, depth))
    return False


def _too_deep(path: str) -> HotfixError:
    return refused(
        "target-too-deep",
        f"{path} is nested too deeply to parse, or an expression in it is too long. "
        "Nothing was changed.",
        hint=REINSTALL_HINT,
        state="drifted",
    )


def _syntax(path: str, line: int | None) -> HotfixError:
    python = ".".join(map(str, sys.version_info[:2]))
    return refused(
        "target-syntax",
        f"{path} does not parse with Python {python} (line {line or 'unknown'}), so this vLLM "
        "cannot work here. Nothing was changed.",
        hint=REINSTALL_HINT,
        state="drifted",
    )


def load_libcst():
    """Imports LibCST; only the paths that a receipt cannot answer come here.

    A bundle's own wheels serve this run where the environment has no LibCST.
    """
    try:
        import libcst
    except ImportError as error:
        if _from_bundle():
            import libcst

            return libcst
        raise environment(
            "no-libcst",
            f"LibCST is needed to judge these sources and cannot be imported ({error}). "
            "Nothing was changed.",
            hint="python3 -m pip install libcst, or: bash run.sh",
        ) from error
    return libcst


def _from_bundle() -> bool:
    wheels = os.path.join(TOOL_ROOT, "wheels")
    if not os.path.isdir(wheels):
        return False
    folder = tempfile.mkdtemp(prefix="vision-exp-libcst-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if not bundled.unpack(wheels, folder):
        return False
    sys.path.insert(0, folder)
    return True
