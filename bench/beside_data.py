"""The requests of a comparison, a file for each row and run: written once, asked of both servers.

Images of 1920x1080 are those of `vllm bench serve --dataset-name random-mm` with the bucket
{(1080,1920,1): 1.0}: independent random pixels as JPEG. Those of 3840x2160 are smooth: random
pixels of that size would measure the network's work with 5 MB each. No image appears in two files.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

#: Letters of a text request. About as many tokens as a 1080p image's block.
LETTERS = 366
#: Requests in each row's file.
COUNTS = {
    "first_image": 6,
    "first_text": 6,
    "images_8": 24,
    "images_32": 64,
    "repeated_8": 24,
    "repeated_32": 64,
    "arriving": 24,
    "streams": 16,
    "text": 96,
    "large": 96,
}


def noisy(seed: int) -> str:
    pixels = np.random.default_rng(seed).integers(0, 256, (1080, 1920, 3), dtype=np.uint8)
    return _url(Image.fromarray(pixels))


def smooth(seed: int) -> str:
    small = np.random.default_rng(seed).integers(0, 256, size=(7, 9, 3), dtype=np.uint8)
    return _url(Image.fromarray(small).resize((3840, 2160), Image.Resampling.BICUBIC))


def _url(image: Image.Image) -> str:
    sink = io.BytesIO()
    image.save(sink, format="JPEG")
    return "data:image/jpeg;base64," + base64.b64encode(sink.getvalue()).decode()


def letters(seed: int) -> str:
    chosen = np.random.default_rng(seed).integers(97, 123, LETTERS, dtype=np.uint8)
    return chosen.tobytes().decode()


def requests(name: str, seed: int) -> Iterator[list[dict]]:
    """The content of each request of a file. ``seed``: no other file's."""
    make: Callable[[int], str] = smooth if name == "large" else noisy
    repeated = make(seed) if name.startswith("repeated") else ""
    for index in range(COUNTS[name]):
        if name in ("first_text", "streams", "text"):
            yield [{"type": "text", "text": letters(seed + index)}]
            continue
        # Every second one is the same image; of the file, so that each run meets it anew.
        url = repeated if repeated and index % 2 else make(seed + 1 + index)
        yield [
            {"type": "text", "text": f"{seed + index} What is this?"},
            {"type": "image_url", "image_url": {"url": url}},
        ]


def path(folder: Path, name: str, run: int) -> Path:
    return folder / f"{name}-{run}.jsonl"


def write(folder: Path, name: str, run: int) -> None:
    """One file, whole or not there."""
    target = path(folder, name, run)
    if target.exists():
        return
    seed = 1_000_000 * (run + 1) + 10_000 * list(COUNTS).index(name)
    part = target.with_suffix(".part")
    with part.open("w") as sink:
        for content in requests(name, seed):
            sink.write(json.dumps({"content": content}) + "\n")
    part.rename(target)


def write_all(folder: Path, runs: range, workers: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(workers) as pool:
        waiting = [pool.submit(write, folder, name, run) for run in runs for name in COUNTS]
        for each in waiting:
            each.result()
