"""CUDA graphs on: answers to images are as near to eager ones as answers to texts are.

    checks_graphs.py EAGER.json GRAPHS.json REPORT.json

EAGER has the cold answers of checks_draft.py without drafting, GRAPHS those of `take`, by which
checks_reuse.py shares its engine. Steps with image rows run without graphs; what graphs replay is
the decoding of what comes after an image.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu.jobs.checks_reference import asks
from gpu.lib.answers import load_answers, save_answers
from gpu.lib.controls import beside, cold_answers, grouped
from gpu.lib.rig import Engine, Report, replaced

REPEATS, TOKENS = 6, 8


def take(engine: Engine, out: Path) -> None:
    """Writes the cold answers of an engine with graphs."""
    save_answers(out, cold_answers(engine, REPEATS))


def replays(engine: Engine) -> tuple[bool, str]:
    """Every decode step after a prefill replays a graph; no step with image rows does."""
    found = {}
    for name, ask in asks().items():
        engine.forget()
        with dispatched(engine) as modes:
            engine.ask(ask, max_tokens=TOKENS)
        found[name] = modes
    good = all(
        modes[0] == "NONE" and len(modes) == TOKENS and "NONE" not in modes[1:]
        for modes in found.values()
    )
    words = (f"{name}: {', then '.join(runs(modes))}" for name, modes in found.items())
    return good, "; ".join(words)


@contextmanager
def dispatched(engine: Engine) -> Iterator[list[str]]:
    """The graph mode of every step, by name: the last that its dispatcher gave before it ran."""
    modes: list[str] = []
    runner = engine.runner
    older = getattr(runner, "cudagraph_dispatcher", None)
    dispatcher = runner.cudagraph_manager if older is None else older  # V2's has one value
    choose, execute = dispatcher.dispatch, runner.execute_model
    latest: list[str] = []

    def chosen(*args: Any, **kwargs: Any) -> Any:
        found = choose(*args, **kwargs)
        latest.append((found.cg_mode if older is None else found[0]).name)
        return found

    def executed(*args: Any, **kwargs: Any) -> Any:
        latest.clear()
        output = execute(*args, **kwargs)
        modes.extend(latest[-1:])
        return output

    with replaced(dispatcher, "dispatch", chosen), replaced(runner, "execute_model", executed):
        yield modes


def runs(modes: list[str]) -> list[str]:
    """Equal ones in a row as one: "7 FULL"."""
    found: list[tuple[str, int]] = []
    for mode in modes:
        before = found.pop() if found and found[-1][0] == mode else (mode, 0)
        found.append((mode, before[1] + 1))
    return [f"{count} {mode}" for mode, count in found]


def main(eager_path: str, graphs_path: str, report_path: str) -> int:
    report = Report(Path(report_path))
    eager = grouped(load_answers(Path(eager_path)))
    graphs = grouped(load_answers(Path(graphs_path)))
    for name in asks():

        def check(name: str = name) -> tuple[bool, str]:
            return beside(name, eager, {each: group.cold for each, group in graphs.items()})

        report.run(f"CUDA graphs on, {name}: as eager", check)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
