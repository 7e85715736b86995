"""The loops over pixels, compiled when this module is imported (three to five seconds).

Only `backend.select_backend` imports it: numba is not imported otherwise. Nothing is kept on disk:
the overlay's folder may be read-only and must not change.

A pixel is a uint32 as Pillow stores it: red in the low byte, then green, blue and a byte of no
meaning. Sums are int32 as in Pillow (resample.py has the source), and each step is cast back to 32
bits, because numba would widen it to 64 and halve what one instruction does. Taps come in fours
(see `resample.GROUP`).

Each call lets go of the GIL, and has to wait for it afterwards: so a call does much at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import config, njit, types

from vision_exp.image.pixels import PATCH
from vision_exp.image.resample import HALF, PRECISION

if config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set, and uncompiled loops would take minutes")

#: Rows of a tile, resampled at once: 64 bytes, whole vectors on every processor.
TILE = 16

_LANES = TILE * 4
_PAIRS = PATCH // 2
_SCALE = np.float32(1 / 255)
_I = np.int32
_U = np.uint32

_PIXELS = types.Array(types.uint32, 2, "C")
_READ_PIXELS = types.Array(types.uint32, 2, "C", readonly=True)
_FILTERS = types.Array(types.int32, 2, "C")
_VALUES = types.Array(types.uint16, 3, "C")
_INT = types.int64


def _loop(*kinds: types.Type) -> Any:
    return njit(types.void(*kinds), nogil=True, error_model="numpy")


@njit
def _four(b0, b1, b2, b3, w0, w1, w2, w3):  # type: ignore[no-untyped-def]
    return _I(_I(_I(_I(b0) * w0) + _I(_I(b1) * w1)) + _I(_I(_I(b2) * w2) + _I(_I(b3) * w3)))


@njit
def _to_byte(total):  # type: ignore[no-untyped-def]
    return np.uint8(min(max(_I(total >> _I(PRECISION)), _I(0)), _I(255)))


@njit
def _copy(source, target, at):  # type: ignore[no-untyped-def]
    for x in range(source.shape[0]):  # a slice's assignment takes a second more to compile
        target[at + x] = source[x]


@_loop(_PIXELS, _FILTERS, _FILTERS, _PIXELS, _PIXELS)
def horizontal_pass(rows, bounds, taps, tile, out):  # type: ignore[no-untyped-def]
    """Resample ``rows`` (n, width) horizontally to ``out`` (n rounded up to 16, new width).

    Sixteen rows are transposed into ``tile`` (width + 4, 16), so that a tap meets all of them in
    one row of memory.
    """
    lanes = tile.view(np.uint8)
    total = np.empty(_LANES, np.int32)
    done = np.empty(_LANES, np.uint8)
    pixels = done.view(np.uint32)
    last = rows.shape[0] - 1
    for top in range(0, rows.shape[0], TILE):
        for i in range(0, TILE, 4):
            r0, r1 = rows[min(top + i, last)], rows[min(top + i + 1, last)]
            r2, r3 = rows[min(top + i + 2, last)], rows[min(top + i + 3, last)]
            for x in range(rows.shape[1]):
                tile[x, i] = r0[x]
                tile[x, i + 1] = r1[x]
                tile[x, i + 2] = r2[x]
                tile[x, i + 3] = r3[x]
        for x in range(bounds.shape[0]):
            for j in range(_LANES):
                total[j] = _I(HALF)
            w = taps[x]
            for k in range(0, bounds[x, 1], 4):
                at = bounds[x, 0] + k
                w0, w1, w2, w3 = w[k], w[k + 1], w[k + 2], w[k + 3]
                s0, s1, s2, s3 = lanes[at], lanes[at + 1], lanes[at + 2], lanes[at + 3]
                for j in range(_LANES):
                    total[j] = _I(total[j] + _four(s0[j], s1[j], s2[j], s3[j], w0, w1, w2, w3))
            for j in range(_LANES):
                done[j] = _to_byte(total[j])
            for i in range(TILE):
                out[top + i, x] = pixels[i]


@_loop(_PIXELS, _INT, _INT, _FILTERS, _FILTERS, _PIXELS, _PIXELS)
def vertical_pass(rows, taken, first, bounds, taps, ring, out):  # type: ignore[no-untyped-def]
    """Resample vertically: source rows ``taken`` on are ``rows``, result rows ``first`` on ``out``.

    ``ring`` is a ring buffer: source row r is kept at r modulo its height, for the calls that
    follow.
    """
    length, size = 4 * ring.shape[1], ring.shape[0]
    total = np.empty(length, np.int32)
    sources, results = ring.view(np.uint8), out.view(np.uint8)
    i = 0
    for y in range(first, first + out.shape[0]):
        while taken + i < bounds[y, 0] + bounds[y, 1]:
            _copy(rows[i], ring[(taken + i) % size], 0)
            i += 1
        for j in range(length):
            total[j] = _I(HALF)
        w = taps[y]
        for k in range(0, bounds[y, 1], 4):
            at = bounds[y, 0] + k
            w0, w1, w2, w3 = w[k], w[k + 1], w[k + 2], w[k + 3]
            r0, r1 = sources[at % size], sources[(at + 1) % size]
            r2, r3 = sources[(at + 2) % size], sources[(at + 3) % size]
            for j in range(length):
                total[j] = _I(total[j] + _four(r0[j], r1[j], r2[j], r3[j], w0, w1, w2, w3))
        result = results[y - first]
        for j in range(length):
            result[j] = _to_byte(total[j])
    for rest in range(i, rows.shape[0]):
        _copy(rows[rest], ring[(taken + rest) % size], 0)


@njit
def _bfloat16(pixel, shift):  # type: ignore[no-untyped-def]
    """Bits of float32 ``(2 x - 255) * (1 / 255)``, rounded to nearest, ties to even, as torch does:
    https://github.com/pytorch/pytorch/blob/v2.7.0/c10/util/BFloat16.h (round_to_nearest_even)."""
    byte = _I(_U(pixel >> shift) & _U(255))
    value = np.float32(_I(_I(byte + byte) - _I(255))) * _SCALE
    bits = np.float32(value).view(np.uint32)
    odd = _U(_U(bits >> _U(16)) & _U(1))
    return np.uint16(_U(_U(bits + _U(0x7FFF)) + odd) >> _U(16))


@njit
def _pack_band(pairs, out):  # type: ignore[no-untyped-def]
    """14 rows, pixels in pairs, to ``out`` (w * 3, 196).

    A patch's pixels are put in order first, so that values are written in order.
    """
    ordered = np.empty(PATCH * _PAIRS, np.uint64)
    pixels = ordered.view(np.uint32)
    for column in range(pairs.shape[1] // _PAIRS):
        for i in range(PATCH):
            row = pairs[i, column * _PAIRS :]
            for j in range(_PAIRS):
                ordered[i * _PAIRS + j] = row[j]
        for channel in range(3):
            values, shift = out[column * 3 + channel], _U(8 * channel)
            for j in range(PATCH * PATCH):
                values[j] = _bfloat16(pixels[j], shift)


@_loop(_READ_PIXELS, _INT, _INT, _PIXELS, _VALUES)
def pack_patches(rows, top, left, band, out):  # type: ignore[no-untyped-def]
    """Rows ``top`` on of an image, from its column ``left`` on, to ``out`` (h, w * 3, 196).

    Those that are no whole band are gathered in ``band`` (14, w * 14), packed when it is full.
    """
    n = 0
    while n < rows.shape[0]:
        at = (top + n) // PATCH
        inside = top + n - at * PATCH
        if inside == 0 and rows.shape[0] - n >= PATCH and rows.shape[1] == band.shape[1]:
            _pack_band(rows[n : n + PATCH].view(np.uint64), out[at])
            n += PATCH
            continue
        _copy(rows[n], band[inside], left)
        if inside == PATCH - 1:
            _pack_band(band.view(np.uint64), out[at])
        n += 1
