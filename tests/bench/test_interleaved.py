"""The workers and verdicts of bench/interleaved.py, without an accelerator."""

from __future__ import annotations

import importlib.util
import os
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
WORKER = """
import sys
sys.path.insert(0, {bench!r})
import interleaved
print("a log line", flush=True)
sys.exit(interleaved.serve({{"add": lambda: [1, 2], "die": lambda: sys.exit(3)}}, int(sys.argv[1])))
"""


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


interleaved = load("interleaved")
sys.path.append(str(BENCH))
serving = load("serving_report")


def test_a_worker_answers_and_its_end_is_noticed(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER.format(bench=str(BENCH))))
    log = tmp_path / "log"
    workers = [
        interleaved.start(f"w{i}", [sys.executable, str(script)], os.environ, log) for i in range(2)
    ]
    try:
        assert [worker.read(30) for worker in workers] == ["ready", "ready"]
        assert [worker.run("add", 30) for worker in workers] == [[1, 2], [1, 2]]
        with pytest.raises(interleaved.WorkerLost, match="w1: ended"):
            workers[1].run("die", 30)
        assert workers[0].run("add", 30) == [1, 2]
    finally:
        for worker in workers:
            worker.stop()
    assert workers[0].process.returncode == 0
    assert "a log line" in log.read_text()


def test_a_silent_worker_is_lost(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    worker = interleaved.start("slow", command, os.environ, tmp_path / "log")
    with pytest.raises(interleaved.WorkerLost, match="no answer"):
        worker.read(0.2)
    worker.stop()
    assert worker.process.returncode is not None


def series(tree: str, *values: float) -> dict[str, list[float]]:
    """Processes whose neighbours slow most of their times, each process's others."""
    return {
        f"{tree} {index}": [value] * 4 + [value * (1.4 + index / 10)] * 9
        for index, value in enumerate(values)
    }


@pytest.mark.parametrize(
    ("stock", "patched", "decided"),
    [
        ((10, 10.01), (10.02, 10.03), True),
        ((10, 10.01), (10.2, 10.21), False),
        ((10, 14), (10, 14.1), None),
        ((10, 10.4), (8, 8.1), True),
    ],
    ids=["equal", "slower", "noise hides it", "faster than the noise"],
)
def test_noise_of_one_tree_decides_what_a_ratio_says(
    stock: tuple[float, float], patched: tuple[float, float], decided: bool | None
) -> None:
    found = interleaved.compare(series("stock", *stock), series("patched", *patched))
    expected = (patched[0] * patched[1] / stock[0] / stock[1]) ** 0.5
    assert found.ratio == pytest.approx(expected)
    assert found.within(1.01) is decided, found.words()


def test_a_text_step_may_call_what_stock_calls_and_nothing_of_ours() -> None:
    def own(every: float, calls: float) -> dict[str, float]:
        return {"all": every, "calls": calls, "microseconds": calls * 7}

    def good(patched: dict[str, float]) -> bool:
        found = {"own": {"stock 1": own(5000, 0), "patched 1": patched, "vision": own(6000, 42)}}
        return serving.functions(found)[0]

    assert good(own(5000.4, 0))
    assert not good(own(5100, 0))
    assert not good(own(5000.4, 0.1))
    assert serving.functions({})[0] is False
