"""PNG files with damage: served as they were where every pixel is there, else refused."""

from __future__ import annotations

import random
import struct
from io import BytesIO

import pytest
from image_kinds import chunk, saved
from PIL import Image
from sample_images import noise

from vision_exp.image.convert import to_rgb
from vision_exp.image.files import mended

#: Few colours, so that a wrong bit may still decode to the right number of rows.
SMOOTH = noise(20, 20).resize((120, 80))
FILE = saved(SMOOTH, "PNG")
FIRST = 33  # where the first chunk after IHDR begins
PIXELS = FILE.index(b"IDAT") + 4
END = len(FILE) - 12  # where IEND begins, four bytes of checksum before it


def seen(data: bytes) -> bytes:
    """RGB bytes. Raises ValueError or what Image.open raises."""
    return to_rgb(Image.open(BytesIO(mended(data)))).tobytes()


def replaced(at: int, *values: int) -> bytes:
    return FILE[:at] + bytes(values) + FILE[at + len(values) :]


def text_chunk(good: bool) -> bytes:
    whole = chunk(b"tEXt", b"Title\0x")
    return whole if good else whole[:-4] + b"\0\0\0\0"


WHOLE = {
    "nothing wrong": FILE,
    "no IEND": FILE[:END],
    "cut inside IEND": FILE[:-3],
    "no checksum of the pixels": FILE[: END - 4],
    "no checksum of the compressed data either": FILE[: END - 8],
    "wrong checksum of the pixels, but right data": replaced(END - 1, FILE[END - 1] ^ 1),
    "wrong checksum after the pixels": FILE[:END] + text_chunk(False) + FILE[END:],
    "wrong checksum of IEND": FILE[:-1] + bytes([FILE[-1] ^ 1]),
    "wrong checksum of text before the pixels": FILE[:FIRST] + text_chunk(False) + FILE[FIRST:],
    "cut inside text": FILE[:END] + text_chunk(True)[:-6],
    "cut inside the orientation": FILE[:END] + struct.pack(">I", 40) + b"eXIfMM",
    "no chunk after the pixels": FILE[:END] + b"no chunk at all, but long enough for one",
    "something behind IEND": FILE + b"something",
    "another image behind IEND": FILE + saved(noise(9, 9), "PNG"),
}


@pytest.mark.parametrize("damage", WHOLE)
def test_whole_pixels_are_served(damage: str) -> None:
    assert seen(WHOLE[damage]) == SMOOTH.tobytes()


def test_a_sound_file_is_not_copied() -> None:
    assert mended(FILE) is FILE
    assert mended(b"GIF89a") == b"GIF89a"


def without_the_last_piece() -> bytes:
    """Pixels in two chunks, each with its checksum, of which the second one is gone."""
    middle = (PIXELS + END) // 2
    return FILE[:FIRST] + chunk(b"IDAT", FILE[PIXELS:middle]) + FILE[END:]


def with_wrong_transparency() -> bytes:
    return FILE[:FIRST] + chunk(b"tRNS", bytes(6))[:-1] + b"\0" + FILE[FIRST:]


LOST = {
    "wrong checksum of the compressed data": replaced(END - 5, FILE[END - 5] ^ 1),
    "cut inside the pixels": FILE[: (PIXELS + END) // 2],
    "one of two chunks of pixels": without_the_last_piece(),
    "wrong checksum of transparency": with_wrong_transparency(),
    "wrong checksum of the header": replaced(FIRST - 1, FILE[FIRST - 1] ^ 1),
    "nothing but the signature": FILE[:8],
}


@pytest.mark.parametrize("damage", LOST)
def test_lost_pixels_are_refused(damage: str) -> None:
    with pytest.raises((ValueError, OSError)):
        seen(LOST[damage])


def test_a_wrong_bit_or_a_cut_anywhere_is_never_another_image() -> None:
    rng = random.Random(0)
    places = [rng.randrange(FIRST, END) for _ in range(300)] + list(range(END - 9, len(FILE)))
    served = 0
    for at in places:
        for damaged in (FILE[:at], replaced(at, FILE[at] ^ 1 << rng.randrange(8))):
            try:
                shown = seen(damaged)
            except (ValueError, OSError):
                continue
            served += 1
            assert shown == SMOOTH.tobytes()
    assert served > 20
