"""Ours beside a vLLM with native vision, on one GPU: every value is written as it comes.

    checks_beside.py measure --runs N ...   four servers (vision and text checkpoint of both), N
                                            alternating runs of each row; prompts after the first
    checks_beside.py start --runs N ...     both vision servers started at one moment, N times

Run 0 is never kept: it compiles kernels. A second call goes on where the first was cut off.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))

import beside_data
from beside_load import Load, drive
from gpu.jobs.beside_prompts import compare_prompts
from gpu.lib.rig import Report
from gpu.lib.servers import IMAGES, Kept, Server, Tree, await_all, freed_by_stop, overlay_of

SIDES = ("ours", "native")
#: Tokens of the streams beside which images arrive: longer than the images take.
STREAM_TOKENS = 600


def plan(folder: Path, run: int) -> dict[str, tuple[str, Load, Load | None, str]]:
    """Row: the checkpoint, its load, a load beside it, the value of which is taken."""

    def load(name: str, tokens: int, **more: Any) -> Load:
        # Half is enough to compile what a row needs.
        count = beside_data.COUNTS[name] // (1 if run else 2)
        return Load(beside_data.path(folder, name, run), count, tokens, **more)

    streams = load("streams", STREAM_TOKENS if run else 200, clients=16)
    return {
        "first_image": ("vision", load("first_image", 1, clients=1), None, "median_ttft_ms"),
        "first_text": ("vision", load("first_text", 1, clients=1), None, "median_ttft_ms"),
        "images_8": ("vision", load("images_8", 64, clients=8), None, "request_throughput"),
        "images_32": ("vision", load("images_32", 64, clients=32), None, "request_throughput"),
        "repeated_8": ("vision", load("repeated_8", 64, clients=8), None, "request_throughput"),
        "repeated_32": ("vision", load("repeated_32", 64, clients=32), None, "request_throughput"),
        "text_vision": ("vision", load("text", 64, clients=32), None, "request_throughput"),
        "text_text": ("text", load("text", 64, clients=32), None, "request_throughput"),
        "streams": ("vision", streams, load("arriving", 64, rate=4), "p99_itl_ms"),
        "streams_large": ("vision", streams, load("large", 1, rate=32), "p99_itl_ms"),
    }


def measure(args: argparse.Namespace) -> int:
    until = time.monotonic() + args.seconds
    kept = Kept(args.kept, args.copy)
    servers = {
        (side, kind): Server(
            tree,
            str(getattr(args, kind)),
            8201 + index,
            log(args, side, kind),
            IMAGES if kind == "vision" else [],
        )
        for index, (side, kind, tree) in enumerate(
            (side, kind, tree) for kind in ("vision", "text") for side, tree in trees(args).items()
        )
    }
    # A fresh interpreter each: the client of the streams shares no lock with the other's images.
    pool = ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"))
    try:
        for server in servers.values():
            server.start()
        beside_data.write_all(args.data, range(args.runs + 1), max((os.cpu_count() or 2) - 6, 1))
        await_all(list(servers.values()), until)
        about(kept, servers)
        missing = 0
        for run in range(args.runs + 1):
            missing += rows(run, args, kept, servers, pool, until)
            if run == 1 and not (args.rows / "beside_prompts.json").exists():
                prompts(args, servers)
        if args.runs:
            # The vision servers first: what they share with nobody else comes free.
            for (side, kind), server in servers.items():
                kept.add(f"memory_{kind}", side, 1, freed_by_stop(server))
    finally:
        for server in servers.values():
            server.stop()
        pool.shutdown(cancel_futures=True)
    return int(missing > 0)


def rows(
    run: int,
    args: argparse.Namespace,
    kept: Kept,
    servers: dict[tuple[str, str], Server],
    pool: ProcessPoolExecutor,
    until: float,
) -> int:
    """One run of every row, the side that begins another one each time; how many values lack.

    A row that fails is told and the others go on. Where time is up, a second call goes on.
    """
    missing = 0
    for row, (kind, load, beside, value) in plan(args.data, run).items():
        for side in SIDES if run % 2 else SIDES[::-1]:
            if kept.has(row, side, run):
                continue
            if time.monotonic() > until - 40:
                print(f"[beside] no time left for {row} {side} {run}", flush=True)
                missing += 1
                continue
            server = servers[side, kind]
            waiting = [pool.submit(drive, load, server.url, server.model)]
            if beside:
                waiting.append(pool.submit(drive, beside, server.url, server.model))
            try:
                found = [each.result(timeout=until - time.monotonic()) for each in waiting]
            except (RuntimeError, TimeoutError) as error:
                print(f"[beside] FAILED {row} {side} {run}: {error!r}", flush=True)
                missing += 1
                continue
            if not run:
                print(f"[beside] warm {row} {side}: {found[0][value]:.2f}", flush=True)
                continue
            more = {"median_itl_ms": found[0]["median_itl_ms"], "seconds": found[0]["duration"]}
            kept.add(row, side, run, found[0][value], **more)
            if beside:
                kept.add(f"{row}_rate", side, run, found[1]["request_throughput"])
    return missing


def prompts(args: argparse.Namespace, servers: dict[tuple[str, str], Server]) -> None:
    report = Report(args.rows / "beside_prompts.json")
    urls = {side: servers[side, "vision"].url for side in SIDES}
    compare_prompts(report, urls)


def start(args: argparse.Namespace) -> int:
    until = time.monotonic() + args.seconds
    kept = Kept(args.kept, args.copy)
    for run in range(1, args.runs + 1):
        if all(kept.has("start", side, run) for side in SIDES):
            continue
        if time.monotonic() > until - 80:
            raise TimeoutError(f"cut short at start {run}: call it again to go on")
        servers = [
            Server(
                tree,
                str(args.vision),
                8211 + i,
                log(args, side, f"start-{run}"),
                IMAGES,
            )
            for i, (side, tree) in enumerate(trees(args).items())
        ]
        try:
            for server in servers if run % 2 else servers[::-1]:
                server.start()
            await_all(servers, until)
            for server in servers:
                kept.add("start", server.tree.side, run, server.seconds)
        finally:
            for server in servers:
                server.stop()
    return 0


def log(args: argparse.Namespace, side: str, what: str) -> Path:
    return Path(args.logs / f"beside-{side}-{what}-serve.log")


def trees(args: argparse.Namespace) -> dict[str, Tree]:
    def path(tree: Path, packages: Path, *more: Path) -> str:
        dsl = packages / "nvidia_cutlass_dsl"
        parts = (tree, args.site, dsl / "dsl_packages", dsl / "python_packages", *more)
        return ":".join(map(str, parts))

    cache = Path(os.environ["VLLM_CACHE_ROOT"])
    return {
        "ours": Tree("ours", path(args.patched, args.site, args.overlay), str(cache)),
        "native": Tree(
            "native",
            path(args.native, args.native),
            str(cache.with_name("vllm-native")),
            jit_warmup=False,
        ),
    }


def about(kept: Kept, servers: dict[tuple[str, str], Server]) -> None:
    """What ran: once."""
    import torch

    if kept.has("about", "ours", 0):
        return
    for side in SIDES:
        (tree, *_) = servers[side, "vision"].tree.path.split(":")
        # The metadata of ours lies among the shared packages.
        site = servers[side, "vision"].tree.path.split(":")[:2]
        release = next(d.version for d in distributions(name="vllm", path=site))
        kept.add(
            "about",
            side,
            0,
            release,
            card=torch.cuda.get_device_name(),
            overlay=overlay_of(servers[side, "vision"].log),
            tree=Path(tree).name,
        )


def arguments(description: str) -> argparse.ArgumentParser:
    """Where both trees, the checkpoints and the logs are, and how long it may take."""
    parser = argparse.ArgumentParser(description=description)
    for name in ("patched", "site", "overlay", "native", "vision", "logs"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=540)
    return parser


def main() -> int:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("verb", choices=("measure", "start"))
    for name in ("text", "kept", "copy", "data", "rows"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    return {"measure": measure, "start": start}[args.verb](args)


if __name__ == "__main__":
    sys.exit(main())
