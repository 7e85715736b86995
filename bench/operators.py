"""Whether the tests notice every operator that is exchanged in the pure modules, by cosmic-ray.

    python3 -m pip install --target FOLDER cosmic-ray==8.7.0
    PYTHONPATH=FOLDER python bench/operators.py [MODULE ...] [--save] [--seconds S]

Each operator of cosmic-ray (https://cosmic-ray.readthedocs.io) that needs no arguments is applied
at each place of a module, one change at a time, in a copy (bench/mutants.py), whose tests have to
notice. Changes of annotations are left out: they run nothing. Those that nobody can notice stand in
bench/operators.txt in the form of the lists of faults: the line, what is put there
(the changed line, the operator's name, or `*` for every change of that line), and why.
Prints noticed, missed and equivalent for each module, and the misses. `--seconds` bounds each
module: changes are made in a random order, always the same, and the rest is not run. Exit 1 for
fewer than 90 % of those that are not equivalent; 2 without cosmic-ray.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import mutants
import reporting

WANTED = 0.90
EQUIVALENT = mutants.REPO / "bench" / "operators.txt"
#: Name -> (file, pytest's arguments): the narrowest tests that say what the module does.
MODULES = {
    "layout": ("vision_exp/layout.py", "tests/vision_exp/test_layout.py"),
    "spans": (
        "vision_exp/engine/spans.py",
        "tests/vision_exp/engine/test_spans.py",
    ),
    "visibility-spans": (
        "vision_exp/visibility/spans.py",
        "tests/vision_exp/visibility/test_decisions.py",
    ),
    "rules": ("vision_exp/chat/rules.py", "tests/vision_exp/chat/test_rules.py"),
    "plan": (
        "anchors/engine/plan.py",
        "tests/anchors/test_blocks.py tests/anchors/test_pipeline.py",
    ),
    "fences": ("anchors/engine/fences.py", "tests/anchors/test_blocks.py"),
    "journal": (
        "anchors/writing/journal.py",
        "tests/writing/test_recorded.py tests/writing/test_held.py",
    ),
    "transaction": (
        "anchors/writing/transaction.py",
        "tests/writing/test_recorded.py tests/writing/test_held.py",
    ),
    "rename": (
        "anchors/kit/rename.py",
        "tests/anchors/test_rename.py tests/anchors/test_cases.py "
        "tests/anchors/test_draft_loaders.py::test_each_shape_that_can_be_proven_is_accepted_and_runs",
    ),
    "resample": ("vision_exp/image/resample.py", "tests/vision_exp/image/test_pixels.py"),
}


@dataclass(frozen=True)
class Change:
    """One operator at one place: the lines that it takes and puts, and the whole text."""

    operator: str
    old: str
    new: str
    text: str


def changes(source: str) -> Iterator[Change]:
    """Every change of a source that runs something else, each once."""
    from cosmic_ray import plugins
    from cosmic_ray.mutating import mutate_code

    seen = {_running(source)}
    for name in sorted(plugins.operator_names()):
        if "Variable" in name:  # these need arguments
            continue
        operator = plugins.get_operator(name)()
        for occurrence in count():
            text = mutate_code(source, operator, occurrence)
            if text is None:
                break
            running = _running(text)
            if running not in seen:
                seen.add(running)
                yield Change(name.removeprefix("core/"), *_lines(source, text), text)


def _running(source: str) -> str:
    """What a module does, without its annotations; the source itself where it does not parse."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Name("A")
    return ast.dump(tree)


def _lines(before: str, after: str) -> tuple[str, str]:
    pairs = difflib.ndiff(before.splitlines(), after.splitlines())
    told = [line for line in pairs if line[:2] in ("- ", "+ ")]
    return tuple(  # type: ignore[return-value]
        " / ".join(line[2:].strip() for line in told if line[0] == sign) for sign in "-+"
    )


def equivalent(known: list[mutants.Fault], file: str, change: Change) -> str:
    """Why nobody can notice a change; empty where somebody can."""
    for one in known:
        if one.file == file and one.old == [change.old]:
            for new in one.new:
                if new in ("*", change.new) or new == change.operator:
                    return one.equivalent
    return ""


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("modules", nargs="*", choices=[*MODULES, []], metavar="MODULE")
    parser.add_argument("--save", action="store_true", help="write a dated file of results")
    parser.add_argument("--limit", type=float, default=60, help="seconds for one change's tests")
    parser.add_argument("--seconds", type=float, default=1e9, help="seconds for one module")
    arguments = parser.parse_args()
    try:
        import cosmic_ray  # noqa: F401
    except ImportError:
        print("cosmic-ray is missing: see --help", file=sys.stderr)
        return 2
    known = mutants.parse("operators", EQUIVALENT.read_text(encoding="utf-8"))
    rows, start = [], time.monotonic()
    mutants.prepare()
    with tempfile.TemporaryDirectory(prefix="operators-") as folder:
        copy = mutants.Copy(Path(folder), arguments.limit)
        for name in arguments.modules or MODULES:
            rows.append(_judged(copy, name, known, arguments.seconds))
    made, noticed = (sum(row[key] for row in rows) for key in ("made", "noticed"))  # type: ignore[misc]
    share = noticed / max(made, 1)
    print(f"{share:.1%} of {made} noticed (wanted: {WANTED:.0%}), {reporting.machine()}")
    if arguments.save:
        seconds = round(time.monotonic() - start)
        reporting.save("operators", {"rows": rows, "share": round(share, 4), "seconds": seconds})
    return 0 if share >= WANTED else 1


def _judged(
    copy: mutants.Copy, name: str, known: list[mutants.Fault], seconds: float
) -> dict[str, object]:
    file, words = MODULES[name]
    tests = tuple(words.split())
    if not copy.passes(tests):
        raise SystemExit(f"fails without a change: {words}")
    source = (copy.folder / file).read_text(encoding="utf-8")
    every = list(changes(source))
    wanted = [change for change in every if not equivalent(known, file, change)]
    same, made, missed = len(every) - len(wanted), 0, []
    end = time.monotonic() + seconds
    for change in random.Random(name).sample(wanted, len(wanted)):
        if time.monotonic() > end:
            break
        made += 1
        if not copy.fails(file, change.text, tests):
            missed.append(change)
            print(
                f"MISSED {name}: {change.operator}\n  - {change.old}\n  + {change.new}", flush=True
            )
    noticed = made - len(missed)
    left = len(wanted) - made
    print(f"{name}: {noticed} of {made} noticed, {same} equivalent, {left} not run", flush=True)
    return {
        "module": name,
        "made": made,
        "noticed": noticed,
        "equivalent": same,
        "not run": left,
        "missed": [f"{one.old} -> {one.new}" for one in missed],
    }


if __name__ == "__main__":
    raise SystemExit(main())
