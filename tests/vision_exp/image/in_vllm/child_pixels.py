"""What holds for a whole process that prepares pixels; prints it as JSON."""

from __future__ import annotations

import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vision_exp.image import backend
from vision_exp.image.transform import image_to_patches
from vision_exp.preview import RELEASED

SIDE = 13377  # squared: the most pixels that Pillow opens without a warning, doubled


def noise(width: int, height: int) -> Image.Image:
    data = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(data)


def peak_mib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) >> 10


def forked(image: Image.Image, expected: torch.Tensor) -> int:
    """Exit status of a forked process that prepares an image: 0 if it gets what is expected."""
    child = os.fork()
    if not child:
        equal = torch.equal(image_to_patches(image, RELEASED).patches, expected)
        os._exit(0 if equal else 3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    torch.set_num_threads(1)
    images = [noise(100 + 37 * n, 400 - 23 * n) for n in range(16)]
    plain = [image_to_patches(image, RELEASED).patches for image in images]
    report = {"numba_before": "numba" in sys.modules}
    report["numba_after"] = backend.warm_up().resamples and "numba" in sys.modules
    with ThreadPoolExecutor(8) as pool:
        fast = list(pool.map(lambda image: image_to_patches(image, RELEASED).patches, images))
    report["threads_equal"] = all(map(torch.equal, plain, fast))
    report["fork_status"] = forked(images[0], plain[0])
    largest = Image.new("RGB", (SIDE, SIDE), (10, 200, 77))
    largest.load()
    before = peak_mib()
    patches = image_to_patches(largest, RELEASED).patches
    report["added_mib"] = peak_mib() - before
    colour = (torch.tensor([10.0, 200.0, 77.0]) / 255 - 0.5) / 0.5
    report["largest_equal"] = bool((patches == colour.to(torch.bfloat16)[:, None, None]).all())
    print("RESULT " + json.dumps(report))


if __name__ == "__main__":
    main()
