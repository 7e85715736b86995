"""What serving costs on a GPU, patched over stock and images over text, by turns on one GPU.

    python bench/gpu_serving.py measure OUT.json REPORT.json LOGS STOCK TEXT PATCHED VISION [S]
    python bench/gpu_serving.py images OUT.json REPORT.json LOGS PATCHED VISION [S]
    python bench/gpu_serving.py judge OUT.json REPORT.json
    python bench/gpu_serving.py work KIND MODEL FD          (what `measure` starts)

STOCK and PATCHED are folders with a vLLM, TEXT and VISION checkpoints. `measure` starts engines of
each tree on the text checkpoint and a patched one on the vision checkpoint, with CUDA graphs, and
lets them take turns for S seconds. PYTHONPATH has the patched tree first and the overlay last.

`images` measures only the last two of these, on one engine.

Judged: a prefill and a decode step of text, patched over stock, and that a text checkpoint's decode
step calls as many functions as stock's, none of vision_exp; an image prefill, visible over causal;
the first token of an image request less that of as much text, beside the tower's time.
"""

from __future__ import annotations

import cProfile
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import interleaved
from gpu.lib.rig import WIDE, Ask, Engine, Report, picture, replaced, text_ids, with_images
from visibility import IMAGE_LIMIT, image_turn, prefill, text_prompt

#: Requests of a decode step, tokens of each, and prefills of one turn.
BATCH, TOKENS, PREFILLS = 8, 34, 6
#: Text engines per tree; all fit on one card, and only one works at a time.
ENGINES = 4
#: Turns before those that count: kernels compile and caches fill.
WARM = 2
START_SECONDS, SECONDS = 240, 150
#: Of the measured time, for patched over stock; the rest is for the vision checkpoint.
TEXT_SHARE = 0.75
#: Text before and after the picture, and the tokens of its block at that position.
BEFORE, BLOCK, AFTER = 60, 369, 40
OVER_STOCK_LIMIT = 1.01
#: Beyond the tower itself, as a share of its time.
FIRST_TOKEN_LIMIT = 1.10

Found = dict[str, Any]


def work(kind: str, model: str, replies: str) -> int:
    """One engine that answers turns: of "text", or of "image" as well."""
    settings = {"cudagraph_capture_sizes": [1, 2, 4, 8]}
    engine = Engine(
        model, enforce_eager=False, compilation_config=settings, enable_prefix_caching=False
    )
    found: dict[str, Callable[[], Any]] = {
        "text": partial(text_turn, engine),
        "own": partial(own_share, engine),
    }
    if kind == "image":
        seeds = iter(range(900, 10**6))
        found["first"] = lambda: first_token(engine, next(seeds))
        found["visible"] = partial(image_turn, engine)
    return interleaved.serve(found, int(replies))


def text_turn(engine: Engine) -> dict[str, list[float]]:
    """Milliseconds: prefills of one text, decode steps of ``BATCH`` texts."""
    ask = text_prompt()
    decode = []
    prefills = [prefill(engine, ask) for _ in range(PREFILLS)]
    for step in decode_steps(engine):
        started = time.perf_counter()
        step()
        decode.append((time.perf_counter() - started) * 1e3)
    return {"prefill": prefills, "decode": decode}


def own_share(engine: Engine) -> dict[str, float]:
    """Of one decode step of ``BATCH`` texts: all calls, those into vision_exp, their microseconds.

    Without the functions of others that it calls; the profiler makes every call slower.
    """
    profile = cProfile.Profile()
    steps = 0
    for step in decode_steps(engine):
        profile.enable()
        step()
        profile.disable()
        steps += 1
    every = profile.getstats()
    own = [
        entry
        for entry in every
        if not isinstance(entry.code, str) and "/vision_exp/" in entry.code.co_filename
    ]
    return {
        "all": sum(entry.callcount for entry in every) / steps,
        "calls": sum(entry.callcount for entry in own) / steps,
        "microseconds": sum(entry.inlinetime for entry in own) / steps * 1e6,
    }


def decode_steps(engine: Engine) -> Iterator[Callable[[], Any]]:
    """What runs one step, as long as ``BATCH`` text requests are being decoded."""
    inner = engine.llm.llm_engine
    for index in range(BATCH):
        inner.add_request(str(index), Ask(text_ids(60, 500 + index)).prompt(), greedy(TOKENS))
    for _ in range(4):
        inner.step()
    while len(engine.scheduler.running) == BATCH:
        yield inner.step
    while inner.has_unfinished_requests():
        inner.step()


def first_token(engine: Engine, seed: int) -> dict[str, Any]:
    """Milliseconds until the first token, (in the front end, in the engine), of three requests.

    A new picture, the same one again with only the front end's caches warm, and as much text; of
    the new picture's preparation the pixels' part and that of its name (vLLM parses and hashes any
    model's pictures); and the tower's time on the GPU, twice.
    """
    import torch
    from vllm.multimodal.processing import BaseProcessingInfo, ProcessorInputs

    from vision_exp.model import processor

    tower: list[tuple[Any, Any]] = []
    pixels: list[float] = []
    naming: list[float] = []
    model = engine.model
    encode = model.embed_multimodal

    def timed_tower(**kwargs: Any) -> Any:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        rows = encode(**kwargs)
        end.record()
        tower.append((start, end))
        return rows

    image = with_images(BEFORE, [picture(*WIDE, seed=seed)], AFTER, 910)
    text = Ask(text_ids(BEFORE + BLOCK + AFTER, seed))
    found: dict[str, Any] = {}
    with replaced(model, "embed_multimodal", timed_tower):
        engine.forget()
        # Whatever comes first after a pause is slower: a text that does not count, and then image
        # and text by turns.
        request(engine, Ask(text_ids(BEFORE + BLOCK + AFTER, seed + 1)))
        if seed % 2:
            found["text"] = request(engine, text)
        with (
            clocked(processor, "images_to_patches", pixels),
            clocked(ProcessorInputs, "get_mm_hashes", naming),
            clocked(BaseProcessingInfo, "parse_mm_data", naming),
        ):
            found["image"] = request(engine, image)
        engine.llm.llm_engine.engine_core.reset_encoder_cache()
        found["again"] = request(engine, image)
        if not seed % 2:
            found["text"] = request(engine, text)
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in tower]
    return {**found, "tower": times, "pixels": sum(pixels), "naming": sum(naming)}


@contextmanager
def clocked(owner: Any, name: str, times: list[float]) -> Iterator[None]:
    """Adds the milliseconds of each call of ``owner``'s function ``name`` to ``times``."""
    call = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        found = call(*args, **kwargs)
        times.append((time.perf_counter() - started) * 1e3)
        return found

    with replaced(owner, name, timed):
        yield


def request(engine: Engine, ask: Ask) -> tuple[float, float]:
    """Milliseconds that one request takes to prepare, and then to its first token."""
    import torch

    inner = engine.llm.llm_engine
    torch.cuda.synchronize()
    started = time.perf_counter()
    inner.add_request("first", ask.prompt(), greedy(1))
    prepared = time.perf_counter()
    while inner.has_unfinished_requests():
        inner.step()
    return (prepared - started) * 1e3, (time.perf_counter() - prepared) * 1e3


def greedy(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


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
            command = [sys.executable, __file__, "work", kind, model]
            log = Path(logs) / f"serving-{label.replace(' ', '-')}.log"
            workers[label] = interleaved.start(
                label, command, environment(tree, tree == patched), log
            )
        until = time.monotonic() + START_SECONDS
        for worker in workers.values():
            worker.read(until - time.monotonic())
        print(f"{len(workers)} engines are up", flush=True)
        # Twice: a first turn compiles kernels.
        for name in ("stock 1", "patched 1", "vision") * 2:
            found["own"][name] = workers[name].turn("own")
        texts = {label: worker for label, worker in workers.items() if label != "vision"}
        alternate(texts, found, float(seconds) * TEXT_SHARE, Path(out))
        images(workers["vision"], found, float(seconds) * (1 - TEXT_SHARE), Path(out))
    except interleaved.WorkerLost as error:
        print(f"cut short: {error}", flush=True)
    finally:
        for worker in workers.values():
            worker.stop()
    return judge(out, report)


def measure_images(
    out: str, report: str, logs: str, patched: str, vision: str, seconds: str = str(SECONDS)
) -> int:
    found: Found = {"vision": [], "visible": [], "first": []}
    command = [sys.executable, __file__, "work", "image", vision]
    log = Path(logs) / "serving-images.log"
    worker = interleaved.start("vision", command, environment(patched, overlay=True), log)
    try:
        worker.read(START_SECONDS)
        images(worker, found, float(seconds), Path(out))
    except interleaved.WorkerLost as error:
        print(f"cut short: {error}", flush=True)
    finally:
        worker.stop()
    return judge_images(Report(Path(report)), found)


def environment(tree: str, overlay: bool) -> dict[str, str]:
    """This process's, with another tree first on the path; stock's path has no overlay."""
    _, *rest = os.environ["PYTHONPATH"].split(":")
    rest = rest if overlay else [entry for entry in rest if not entry.endswith("overlay")]
    cache = Path(os.environ["VLLM_CACHE_ROOT"]).with_name(f"vllm-{Path(tree).name}")
    return os.environ | {"PYTHONPATH": ":".join([tree, *rest]), "VLLM_CACHE_ROOT": str(cache)}


def alternate(
    workers: dict[str, interleaved.Worker], found: Found, seconds: float, out: Path
) -> None:
    """Rounds of one turn each, the first one another every time; every round is kept whole."""
    names = list(workers)
    for _ in range(WARM):
        for worker in workers.values():
            worker.turn("text")
    until = time.monotonic() + seconds
    count = 0
    while time.monotonic() < until:
        first = count % len(names)
        result = {name: workers[name].turn("text") for name in names[first:] + names[:first]}
        for name, times in result.items():
            found["text"].setdefault(name, []).append(times)
        out.write_text(json.dumps(found))
        count += 1


def images(worker: interleaved.Worker, found: Found, seconds: float, out: Path) -> None:
    for name in ("first", "visible", "text") * WARM:
        worker.turn(name)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found["first"].append(worker.turn("first"))
        found["visible"] += worker.turn("visible")
        found["vision"].append(worker.turn("text"))
        out.write_text(json.dumps(found))


def judge(out: str, report_path: str) -> int:
    report = Report(Path(report_path))
    found = json.loads(Path(out).read_text()) if Path(out).exists() else {}
    for kind, name in (("prefill", "text prefill"), ("decode", "decode step")):
        report.run(f"{name}, patched over stock", lambda k=kind: over_stock(found, k))
    report.run("decode step, functions called", lambda: functions(found))
    return judge_images(report, found)


def judge_images(report: Report, found: Found) -> int:
    report.run("image prefill, visible over causal", lambda: over_causal(found))
    report.run("first token, in the engine", lambda: over_text(found, whole=False))
    report.run("first token, with the preparation", lambda: over_text(found, whole=True))
    return 0 if all(row.ok is not False for row in report.rows) else 1


def over_stock(found: Found, kind: str) -> tuple[bool | None, str]:
    if not found.get("text"):
        return False, "nothing was measured"
    series = {label: together(rows, kind) for label, rows in found["text"].items()}
    stock = {label: times for label, times in series.items() if label.startswith("stock")}
    patched = {label: times for label, times in series.items() if label not in stock}
    result = interleaved.compare(stock, patched)
    middle = ", ".join(f"{label} {statistics.median(t):.3f}" for label, t in series.items())
    words = f"{result.words()}; medians, ms: {middle}; {min(map(len, series.values()))} times each"
    if found["vision"]:
        fast = interleaved.fastest_tenth(together(found["vision"], kind))
        words += f"; vision checkpoint, fastest tenth {fast:.3f}"
    good = result.within(OVER_STOCK_LIMIT)
    if good is None:
        words += "; not decided, processes of one tree differ by more than the limit allows to see"
    return good, words


def together(rows: list[dict[str, list[float]]], kind: str) -> list[float]:
    return [time for turn in rows for time in turn[kind]]


def functions(found: Found) -> tuple[bool, str]:
    """A text checkpoint's decode step calls what stock's does, and nothing of vision_exp."""
    own = found.get("own")
    if not own:
        return False, "nothing was measured"
    stock, patched, vision = (own[label] for label in ("stock 1", "patched 1", "vision"))
    words = (
        f"text checkpoint {patched['all']:.1f} calls where stock has {stock['all']:.1f}, "
        f"{patched['calls']:.1f} of them into vision_exp; of text on the vision checkpoint "
        f"{vision['calls']:.1f}, {vision['microseconds']:.0f} us in them under the profiler"
    )
    good = patched["calls"] == 0 and patched["all"] <= OVER_STOCK_LIMIT * stock["all"]
    return good, words


def over_causal(found: Found) -> tuple[bool, str]:
    if not found.get("visible"):
        return False, "nothing was measured"
    ratios = [visible / causal for visible, causal in found["visible"]]
    low, middle, high = statistics.quantiles(ratios, n=4)
    words = f"ratio {middle:.4f} (half of the pairs within {low:.4f} to {high:.4f})"
    return middle <= IMAGE_LIMIT, f"{words}, {len(ratios)} pairs"


def over_text(found: Found, *, whole: bool) -> tuple[bool, str]:
    """``whole``: with the preparation in the front end, as one waits for it when nothing else runs;
    else in the engine alone."""
    rows = found.get("first")
    if not rows:
        return False, "nothing was measured"
    tower = statistics.median(time for row in rows for time in row["tower"])
    extras = [
        (sum(row["image"]) - sum(row["text"])) if whole else row["image"][1] - row["text"][1]
        for row in rows
    ]
    extra = statistics.median(extras)
    parts = {
        name: " + ".join(f"{statistics.median(row[name][i] for row in rows):.1f}" for i in (0, 1))
        for name in ("image", "again", "text")
    }
    pixels, naming = (statistics.median(row[name] for row in rows) for name in ("pixels", "naming"))
    words = (
        f"image less text {extra:.1f} ms = {extra / tower:.2f} of the tower's {tower:.1f} ms, nine "
        f"rounds of ten within {statistics.quantiles(extras, n=10)[-1]:.1f}; "
        f"front end + engine: image {parts['image']} ms, prepared before {parts['again']} ms, "
        f"text {parts['text']} ms; of a picture's preparation, parsing and hash "
        f"{naming:.1f} ms, pixels to patches {pixels:.1f} ms; {len(rows)} rounds"
    )
    return extra <= FIRST_TOKEN_LIMIT * tower, words


if __name__ == "__main__":
    verbs = {"measure": measure, "images": measure_images, "judge": judge, "work": work}
    sys.exit(verbs[sys.argv[1]](*sys.argv[2:]))
