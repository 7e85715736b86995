"""5,000 broken and odd images through image_to_patches; prints counts and peak memory as JSON.

Arguments: number of cases, vLLM's multimodal/image.py (its loader's rules, for the right result).
A process of its own, so that its peak memory means something.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import ModuleType, SimpleNamespace

import native_image
import numpy as np
import tiny_config
import torch
from PIL import Image, features

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT))

from vision_exp.config import VisionConfig  # noqa: E402
from vision_exp.image import backend  # noqa: E402
from vision_exp.image.transform import ImagePatches, image_to_patches  # noqa: E402
from vision_exp.layout import block_length  # noqa: E402

FORMATS = {
    "PNG": ("RGB", "RGBA", "L", "LA", "P", "1", "I;16"),
    "JPEG": ("RGB", "L", "CMYK"),
    "GIF": ("P", "L"),
    "BMP": ("RGB", "L", "1"),
    "TIFF": ("RGB", "RGBA", "L", "F", "I;16", "LAB"),
    "WEBP": ("RGB", "RGBA"),
    "PPM": ("RGB", "L"),
    "TGA": ("RGB", "RGBA"),
    "ICO": ("RGBA",),
    "JPEG2000": ("RGB", "LA"),
    "PCX": ("RGB", "P"),
    "SGI": ("RGB",),
}
BARE_MODES = ("1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "LA", "PA")
BARE_MODES += ("La", "RGBa", "RGBX", "I;16", "I;16L", "I;16B")
NUMBERS = (0, 1, 2, 0x7F, 0xFF, 0x100, 0x7FFF, 0xFFFF, 0x10000, 0x7FFFFFFF, 0xFFFFFFFF)


def noise(rng: random.Random, mode: str, width: int, height: int) -> Image.Image:
    blank = Image.new(mode, (width, height))
    image = Image.frombytes(mode, (width, height), rng.randbytes(len(blank.tobytes())))
    if mode == "P":
        image.putpalette(rng.randbytes(768))
    return image


def sources(rng: random.Random) -> list[bytes]:
    """Small files of every format and mode that this Pillow can write, some with an orientation."""
    files = []
    for kind, modes in FORMATS.items():
        if kind == "JPEG2000" and not features.check("jpg_2000"):
            continue
        if kind == "WEBP" and not features.check("webp"):
            continue
        for mode in modes:
            for number in range(3):
                width, height = rng.randint(1, 90), rng.randint(1, 90)
                extra = {}
                if number == 1 and kind in ("PNG", "JPEG", "TIFF", "WEBP"):
                    exif = Image.Exif()
                    exif[0x0112] = rng.randint(1, 8)
                    extra["exif"] = exif
                if number == 2 and kind in ("PNG", "GIF") and mode in ("P", "L", "RGB"):
                    extra["transparency"] = (1, 2, 3) if mode == "RGB" else 5
                buffer = BytesIO()
                noise(rng, mode, width, height).save(buffer, kind, **extra)
                files.append(buffer.getvalue())
    return files


def truncated(rng: random.Random, data: bytes, _: list[bytes]) -> bytes:
    return data[: rng.randrange(len(data))]


def flipped(rng: random.Random, data: bytes, _: list[bytes]) -> bytes:
    broken = bytearray(data)
    reach = min(len(broken), 64) if rng.random() < 0.5 else len(broken)  # half in the header
    for _ in range(rng.choice((1, 1, 2, 8))):
        broken[rng.randrange(reach)] ^= 1 << rng.randrange(8)
    return bytes(broken)


def wrong_header(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    cut = rng.randint(2, 40)
    return rng.choice(others)[:cut] + data[cut:]


def wrong_number(rng: random.Random, data: bytes, _: list[bytes]) -> bytes:
    size = rng.choice((2, 4))
    number = rng.choice(NUMBERS) & ((1 << 8 * size) - 1)
    place = rng.randrange(min(len(data), 64))
    piece = number.to_bytes(size, rng.choice(("big", "little")))
    return data[:place] + piece + data[place + size :]


def spliced(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    return data[: rng.randrange(len(data))] + rng.choice(others)[rng.randrange(40) :]


def intact(_: random.Random, data: bytes, __: list[bytes]) -> bytes:
    return data


def bare(rng: random.Random) -> Image.Image:
    """An image that never was a file: any mode, ordinary or extreme sides, odd metadata."""
    mode = rng.choice(BARE_MODES)
    if rng.random() < 0.4:
        sides = [rng.choice((1, 2, 3)), rng.choice((1, 500, 20000, 300000))]
        rng.shuffle(sides)
        image = Image.new(mode, (sides[0], sides[1]))
    else:
        image = noise(rng, mode, rng.randint(1, 120), rng.randint(1, 120))
    if rng.random() < 0.3:
        image.info["transparency"] = rng.choice((0, 300, b"\x00\x80", (1, 2, 3), "red", None))
    if rng.random() < 0.3:
        image.info["exif"] = rng.choice((b"", b"Exif\0\0", rng.randbytes(40), "text", 7))
    return image


def judge(image: Image.Image) -> tuple[str, ImagePatches | None]:
    try:
        result = image_to_patches(image, CONFIG)
    except ValueError as error:
        return ("ValueError" if str(error) else "ValueError without a reason"), None
    except Exception as error:  # noqa: BLE001  counted, and the test fails on it
        return f"{type(error).__name__}: {error}"[:200], None
    height, width = result.vit_grid
    sound = (
        result.patches.shape == (height * width, 3, 14, 14)
        and result.patches.dtype == torch.bfloat16
        and bool(result.patches.abs().max() <= 1)
        and block_length(result.llm_grid, 0) <= 384
    )
    return ("patches" if sound else f"unsound {result.vit_grid}"), result


def expected(image: Image.Image, loader: ModuleType, native: SimpleNamespace) -> torch.Tensor:
    kind, zero_is_white = image.format, getattr(image, "tag_v2", {}).get(262) == 0
    upright = loader.normalize_image(image)
    if upright.mode in ("I", "F") or upright.mode.startswith("I;16"):
        upright = grey(upright, zero_is_white and upright.mode.startswith("I;16"))
    elif upright.mode in ("RGBa", "La"):
        upright = upright.convert(upright.mode[:-1] + "A")
    elif upright.mode == "RGBA" and kind in ("BMP", "TGA") and not upright.getextrema()[3][1]:
        upright = upright.convert("RGB")
    plain = loader.convert_image_mode(upright, "RGB")
    return native.load_image(plain, **native_image.PARAMETERS)[0]


def grey(image: Image.Image, zero_is_white: bool) -> Image.Image:
    """What vLLM's loader would clip, by a formula of its own."""
    stored = np.asarray(image).astype(np.float64)
    values = 65535 - stored if zero_is_white else stored
    if values.max() > 255:
        values = values / 256
    elif image.mode == "F" and values.max() <= 1:
        values = np.round(values * 255)
    shown = np.floor(values).astype(np.uint8)
    clear = image.info.get("transparency")
    return Image.fromarray(
        np.where(stored == clear, np.uint8(255), shown) if isinstance(clear, int) else shown
    )


CONFIG = VisionConfig.from_hf_config(SimpleNamespace(**tiny_config.vision_config()))
MUTATIONS: tuple[Callable[[random.Random, bytes, list[bytes]], bytes], ...] = (
    truncated,
    flipped,
    flipped,
    wrong_header,
    wrong_number,
    wrong_number,
    spliced,
    intact,
)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if not backend.warm_up().resamples:
        raise SystemExit("the compiled loops do not run here")
    count = int(sys.argv[1])
    spec = importlib.util.spec_from_file_location("released_vllm_image", sys.argv[2])
    loader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    native = native_image.functions()
    rng = random.Random(20240817)
    files = sources(rng)
    outcomes: Counter[str] = Counter()
    compared = differing = 0
    before = peak_mib()
    for _ in range(count):
        if rng.random() < 0.2:
            image = bare(rng)
            again: Callable[[], Image.Image] = image.copy
        else:
            data = rng.choice(MUTATIONS)(rng, rng.choice(files), files)
            again = lambda data=data: Image.open(BytesIO(data))  # noqa: E731
            try:
                image = again()
            except Exception as error:  # noqa: BLE001  Pillow's own refusal, before our code
                outcomes["not opened: " + type(error).__name__] += 1
                continue
        outcome, result = judge(image)
        outcomes[outcome] += 1
        if result is not None and rng.random() < 0.25:
            compared += 1
            differing += not torch.equal(result.patches, expected(again(), loader, native))
    report = {"outcomes": outcomes, "compared": compared, "differing": differing}
    report |= {"peak_mib": peak_mib(), "before_mib": before}
    print("RESULT " + json.dumps(report))


def peak_mib() -> int:
    """Largest resident size of this process so far. Not getrusage: that keeps, across exec, the
    size of the test process this one was forked from."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) >> 10


if __name__ == "__main__":
    main()
