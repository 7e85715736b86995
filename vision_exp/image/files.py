"""Image files whose pixels are whole although something else is not.

Pillow takes most of them as they are. Of a PNG it refuses one that ends inside a chunk behind the
pixels, or has a wrong checksum in a chunk that does not matter; and it never looks at the checksum
of the pixels themselves. https://www.w3.org/TR/png-3/ (5.3, 5.4 and 13.2)
"""

from __future__ import annotations

import zlib

_PNG = b"\x89PNG\r\n\x1a\n"
_PIECE = 1 << 20


def mended(data: bytes) -> bytes:
    """The file without what Pillow would trip over; itself where there is none of it.

    Raises ValueError where a checksum says that the pixels are wrong.
    """
    if not data.startswith(_PNG):
        return data
    view, at = memoryview(data), len(_PNG)
    kept = [view[:at]]
    pixels: list[memoryview] = []
    sound = True
    while at + 8 <= len(view):
        kind = bytes(view[at + 4 : at + 8])
        end = at + 12 + int.from_bytes(view[at : at + 4], "big")
        if end > len(view) and kind != b"IDAT":
            break
        body, stored = view[at + 8 : end - 4], view[end - 4 : end]
        right = zlib.crc32(body, zlib.crc32(kind)) == int.from_bytes(stored, "big")
        if kind == b"IDAT":
            pixels.append(body)
            sound &= right or end > len(view)  # of one that is cut off, Pillow finds what lacks
        if right or not _is_extra(kind):
            kept.append(view[at:end])
        at = end
        if kind == b"IEND":
            break
    if not (sound or _inflates(pixels)):
        raise ValueError("a checksum in the PNG file says that its pixels are damaged")
    whole = sum(map(len, kept)) == len(view)
    return data if whole else b"".join(kept)


def _is_extra(kind: bytes) -> bool:
    """Whether the pixels are the same without this chunk: an ancillary one, but transparency."""
    return bool(kind[0] & 0x20) and kind != b"tRNS"


def _inflates(pixels: list[memoryview]) -> bool:
    """Whether the compressed pixels, whose own checksum stands at their end, are right."""
    stream = zlib.decompressobj()
    try:
        for part in pixels:
            rest: bytes | memoryview = part
            while rest and not stream.eof:
                stream.decompress(rest, _PIECE)
                rest = stream.unconsumed_tail
    except zlib.error:
        return False
    return stream.eof
