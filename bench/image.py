"""Images to patches against native vLLM's own functions, as ratios measured in one run.

    python bench/image.py [--rounds N] [--write-results]

Both sides give equal bits (checked first) on a 1920x1080 image. Throughput over native's:
  after   what follows Pillow's resize and pad, one thread's CPU time: of an image that already
          fits, by the same function as any other. Wanted: at least 4
  whole   all of it, one thread's CPU time. Wanted: at least 1.25
  eight   eight images, ours on two threads, native's loop with two torch threads.
          Wanted: at least 2
Native's large float arrays cost most where the allocator returns them to the system each time, and
a process can be in either state. So all is measured in two processes: one whose allocator keeps
freed memory, one that returns it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "tests"), str(REPO / "tests" / "support")]

import native_image  # noqa: E402 (the path is set above)
import numpy as np  # noqa: E402
import PIL  # noqa: E402
import reporting  # noqa: E402
import tiny_config  # noqa: E402
import torch  # noqa: E402
from PIL import Image, ImageOps  # noqa: E402

from vision_exp.config import VisionConfig  # noqa: E402
from vision_exp.image import backend, pixels  # noqa: E402
from vision_exp.image import transform as ours  # noqa: E402

SIZE = (1920, 1080)
CONFIG = VisionConfig.from_hf_config(SimpleNamespace(**tiny_config.vision_config()))
WANTED = {"after": 4.0, "whole": 1.25, "eight": 2.0}
#: glibc's settings; naming a threshold also stops glibc from moving it.
HEAPS = {
    "kept": "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=4294967296",
    "returned": "glibc.malloc.mmap_threshold=131072",
}


class Fitted:
    """Stands for an image that Pillow has converted, resized and padded already."""

    def __init__(self, image: Image.Image, size: tuple[int, int]) -> None:
        self.fitted, self.size = image, size
        self.width, self.height = size

    def convert(self, mode: str) -> Fitted:
        return self


def measure(rounds: int) -> dict[str, dict[str, float]]:
    native = native_image.functions()
    compiled = backend.warm_up()
    if not compiled.resamples:
        raise SystemExit("the compiled loops do not run here: see the warning above")
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (*SIZE[::-1], 3), np.uint8)) for _ in range(8)]
    image = images[0]
    grid = ours.vit_grid_for(*SIZE, CONFIG)
    target = (grid[1] * CONFIG.patch_size, grid[0] * CONFIG.patch_size)
    fitted = ImageOps.pad(image, target, color=(127, 127, 127))

    def load(one: Image.Image | Fitted, functions: SimpleNamespace = native) -> torch.Tensor:
        return functions.load_image(one, **native_image.PARAMETERS)[0]

    # The same function with a pad that only hands over the image padded before.
    after = native_image.functions.__wrapped__()
    after.load_image.__globals__["ImageOps"] = SimpleNamespace(pad=lambda one, *_, **__: one.fitted)
    after.load_image.__globals__["np"] = np
    ready = Fitted(fitted, SIZE)

    def mine_after() -> torch.Tensor:
        size = ours.vit_grid_for(*SIZE, CONFIG)
        return pixels.patches_of(fitted, size, CONFIG.patch_size, compiled)

    expected = load(image).view(torch.int16)
    for got in (load(ready, after), mine_after(), ours.image_to_patches(image, CONFIG).patches):
        if not torch.equal(got.view(torch.int16), expected):
            raise SystemExit("the sides do not give equal bits")
    torch.set_num_threads(1)
    figures = {
        "after": reporting.compare(
            lambda: load(ready, after), mine_after, rounds * 4, time.thread_time
        ),
        "whole": reporting.compare(
            lambda: load(image),
            lambda: ours.image_to_patches(image, CONFIG),
            rounds,
            time.thread_time,
        ),
    }
    torch.set_num_threads(2)
    figures["eight"] = reporting.compare(
        lambda: [load(one) for one in images],
        lambda: ours.images_to_patches(images, CONFIG, threads=2),
        max(3, rounds // 3),
    )
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--write-results", action="store_true", help="keep them in bench/results/")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.rounds)))
        return 0
    figures = {}
    for heap, tunables in HEAPS.items():
        command = [sys.executable, __file__, "--measure", "--rounds", str(options.rounds)]
        environment = {**os.environ, "GLIBC_TUNABLES": tunables}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        # Fetching native code for the first time says so before the figures.
        for name, figure in json.loads(done.stdout.splitlines()[-1]).items():
            figures[f"{name}, memory {heap}"] = figure
    wanted = {name: WANTED[name.split(",")[0]] for name in figures}
    versions = {
        "native": native_image.RELEASE,
        "pillow": PIL.__version__,
        "torch": torch.__version__,
        "rounds": str(options.rounds),
    }
    return reporting.report("image", versions, figures, wanted, keep=options.write_results)


if __name__ == "__main__":
    raise SystemExit(main())
