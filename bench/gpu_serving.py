"""What serving costs on a GPU, patched over stock and images over text, interleaved on one GPU.

    python bench/gpu_serving.py measure OUT.json REPORT.json LOGS STOCK TEXT PATCHED VISION [S]
    python bench/gpu_serving.py images OUT.json REPORT.json LOGS PATCHED VISION [S]
    python bench/gpu_serving.py assess OUT.json REPORT.json

STOCK and PATCHED are folders with a vLLM, TEXT and VISION checkpoints. `measure` starts engines of
each tree on the text checkpoint and a patched one on the vision checkpoint, with CUDA graphs, and
runs them in turn for S seconds. PYTHONPATH has the patched tree first and the overlay last.

`images` measures only the last two of these, on one engine.

Assessed: a prefill and a decode step of text, patched over stock; that a text checkpoint's decode
step calls as many functions as stock's, none of vision_exp; an image prefill, visible over causal;
the first token of an image request less that of as much text, beside the tower's time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import interleaved
from serving_report import Found, Report, assess, assess_images

ENGINE = Path(__file__).with_name("serving_engine.py")
#: Text engines per tree; all fit on one card, and only one works at a time.
ENGINES = 4
#: Runs before those that count: kernels compile and caches fill.
WARM = 2
START_SECONDS, SECONDS = 240, 150
#: Of the measured time, for patched over stock; the rest is for the vision checkpoint.
TEXT_SHARE = 0.75


def measure(
    out: str,
    report: str,
    logs: str,
    stock: str,
    text: str,
    patched: str,
    vision: str,
    seconds: str = str(SECONDS),
) -> int:
    workers: dict[str, interleaved.Worker] = {}
    found: Found = {"text": {}, "own": {}, "vision": [], "visible": [], "first": []}
    plan = {
        f"{name} {index}": (tree, "text", text)
        for index in range(1, ENGINES + 1)
        for name, tree in (("stock", stock), ("patched", patched))
    }
    plan["vision"] = (patched, "image", vision)
    try:
        for label, (tree, kind, model) in plan.items():
            command = [sys.executable, str(ENGINE), kind, model]
            log = Path(logs) / f"serving-{label.replace(' ', '-')}.log"
            workers[label] = interleaved.start(
                label, command, environment(tree, tree == patched), log
            )
        until = time.monotonic() + START_SECONDS
        for worker in workers.values():
            worker.read(until - time.monotonic())
        print(f"{len(workers)} engines are up", flush=True)
        # Twice: a first run compiles kernels.
        for name in ("stock 1", "patched 1", "vision") * 2:
            found["own"][name] = workers[name].run("own")
        texts = {label: worker for label, worker in workers.items() if label != "vision"}
        alternate(texts, found, float(seconds) * TEXT_SHARE, Path(out))
        images(workers["vision"], found, float(seconds) * (1 - TEXT_SHARE), Path(out))
    except interleaved.WorkerLost as error:
        print(f"cut short: {error}", flush=True)
    finally:
        for worker in workers.values():
            worker.stop()
    return assess(out, report)


def measure_images(
    out: str, report: str, logs: str, patched: str, vision: str, seconds: str = str(SECONDS)
) -> int:
    found: Found = {"vision": [], "visible": [], "first": []}
    command = [sys.executable, str(ENGINE), "image", vision]
    log = Path(logs) / "serving-images.log"
    worker = interleaved.start("vision", command, environment(patched, overlay=True), log)
    try:
        worker.read(START_SECONDS)
        images(worker, found, float(seconds), Path(out))
    except interleaved.WorkerLost as error:
        print(f"cut short: {error}", flush=True)
    finally:
        worker.stop()
    return assess_images(Report(Path(report)), found)


def environment(tree: str, overlay: bool) -> dict[str, str]:
    """This process's, with another tree first on the path; stock's path has no overlay."""
    _, *rest = os.environ["PYTHONPATH"].split(":")
    rest = rest if overlay else [entry for entry in rest if not entry.endswith("overlay")]
    cache = Path(os.environ["VLLM_CACHE_ROOT"]).with_name(f"vllm-{Path(tree).name}")
    return os.environ | {"PYTHONPATH": ":".join([tree, *rest]), "VLLM_CACHE_ROOT": str(cache)}


def alternate(
    workers: dict[str, interleaved.Worker], found: Found, seconds: float, out: Path
) -> None:
    """Rounds of one run each, the first one another every time; every round is kept whole."""
    names = list(workers)
    for _ in range(WARM):
        for worker in workers.values():
            worker.run("text")
    until = time.monotonic() + seconds
    count = 0
    while time.monotonic() < until:
        first = count % len(names)
        result = {name: workers[name].run("text") for name in names[first:] + names[:first]}
        for name, times in result.items():
            found["text"].setdefault(name, []).append(times)
        out.write_text(json.dumps(found))
        count += 1


def images(worker: interleaved.Worker, found: Found, seconds: float, out: Path) -> None:
    for name in ("first", "visible", "text") * WARM:
        worker.run(name)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found["first"].append(worker.run("first"))
        found["visible"] += worker.run("visible")
        found["vision"].append(worker.run("text"))
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    verbs = {"measure": measure, "images": measure_images, "assess": assess}
    sys.exit(verbs[sys.argv[1]](*sys.argv[2:]))
