"""Pictures to patches against native vLLM's own functions, as ratios measured in one run.

    python bench/image.py [--rounds N] [--write-results]

Both sides give equal bits (checked first) on a 1920x1080 picture. Throughput over native's:
  after   what follows Pillow's resize and pad, one thread. Wanted: at least 4
  whole   all of it, one thread. Wanted: at least 1.25
  eight   eight pictures, ours on two threads, native's loop with two torch threads.
          Wanted: at least 2
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "tests")]

import native_image  # noqa: E402 (the path is set above)
import numpy as np  # noqa: E402
import PIL  # noqa: E402
import tiny_config  # noqa: E402
import torch  # noqa: E402
from PIL import Image, ImageOps  # noqa: E402

from vision_exp import image as ours  # noqa: E402
from vision_exp.config import VisionConfig  # noqa: E402

SIZE = (1920, 1080)
CONFIG = VisionConfig.from_hf_config(SimpleNamespace(**tiny_config.vision_config()))
WANTED = {"after": 4.0, "whole": 1.25, "eight": 2.0}


class Fitted:
    """Stands for a picture that Pillow has converted, resized and padded already."""

    def __init__(self, image: Image.Image, size: tuple[int, int]) -> None:
        self.fitted, self.size = image, size
        self.width, self.height = size

    def convert(self, mode: str) -> Fitted:
        return self


def milliseconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def compare(
    native: Callable[[], object], mine: Callable[[], object], threads: int, rounds: int
) -> dict[str, float]:
    """Medians of turns, native and ours one after the other, after one unmeasured turn each.

    The ratio is the median of the turns' ratios: both halves of a turn see the same machine.
    """
    torch.set_num_threads(threads)
    turns = [(milliseconds(native), milliseconds(mine)) for _ in range(rounds + 1)][1:]
    return {
        "native_ms": round(statistics.median(first for first, _ in turns), 2),
        "ours_ms": round(statistics.median(second for _, second in turns), 2),
        "ratio": round(statistics.median(first / second for first, second in turns), 2),
    }


def measure(rounds: int) -> dict[str, dict[str, float]]:
    native = native_image.functions()
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (*SIZE[::-1], 3), np.uint8)) for _ in range(8)]
    image = images[0]
    grid = ours.vit_grid_for(*SIZE, CONFIG)
    target = (grid[1] * CONFIG.patch_size, grid[0] * CONFIG.patch_size)
    fitted = ImageOps.pad(image, target, color=(127, 127, 127))

    def load(one: Image.Image | Fitted, functions: SimpleNamespace = native) -> torch.Tensor:
        return functions.load_image(one, **native_image.PARAMETERS)[0]

    # The same function with a pad that only hands over the picture padded before.
    after = native_image.functions.__wrapped__()
    after.load_image.__globals__["ImageOps"] = SimpleNamespace(pad=lambda one, *_, **__: one.fitted)
    after.load_image.__globals__["np"] = np
    ready = Fitted(fitted, SIZE)

    def mine_after() -> torch.Tensor:
        return ours._patches_of(fitted, ours.vit_grid_for(*SIZE, CONFIG), CONFIG.patch_size)

    expected = load(image).view(torch.int16)
    for got in (load(ready, after), mine_after(), ours.image_to_patches(image, CONFIG).patches):
        if not torch.equal(got.view(torch.int16), expected):
            raise SystemExit("the sides do not give equal bits")
    return {
        "after": compare(lambda: load(ready, after), mine_after, 1, rounds * 4),
        "whole": compare(
            lambda: load(image), lambda: ours.image_to_patches(image, CONFIG), 1, rounds
        ),
        "eight": compare(
            lambda: [load(one) for one in images],
            lambda: ours.images_to_patches(images, CONFIG, threads=2),
            2,
            max(3, rounds // 3),
        ),
    }


def machine() -> str:
    names = [platform.processor() or platform.machine()]
    info = Path("/proc/cpuinfo")
    if info.exists():
        names += [n.split(":")[1].strip() for n in info.read_text().splitlines() if "model n" in n]
    return f"{os.cpu_count()} x {names[-1]}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--write-results", action="store_true", help="keep them in bench/results/")
    options = parser.parse_args()
    found = measure(options.rounds)
    report = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "pillow": PIL.__version__,
        "torch": torch.__version__,
        "native": native_image.RELEASE,
        "rounds": options.rounds,
        "figures": {name: {**one, "wanted": WANTED[name]} for name, one in found.items()},
    }
    print(f"{report['machine']}, Pillow {PIL.__version__}, torch {torch.__version__}, medians")
    missed = False
    for name, figure in report["figures"].items():
        late = figure["ratio"] < figure["wanted"]
        missed |= late
        print(
            f"{name:6} native {figure['native_ms']:8.2f} ms   ours {figure['ours_ms']:8.2f} ms   "
            f"{figure['ratio']:5.2f} times   wanted: at least {figure['wanted']:g}"
            + ("   MISSED" if late else "")
        )
    if options.write_results:
        target = REPO / "bench" / "results" / f"image-{report['date']}.json"
        target.write_text(json.dumps(report, indent=2) + "\n")
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
