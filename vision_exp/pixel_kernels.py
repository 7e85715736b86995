"""The loops over pixels, compiled when this module is imported (about two seconds).

Only `pixels.warm` imports it: numba is not imported otherwise. Every function lets go of
the GIL. None is kept on disk: the overlay's folder may be read-only and must not change.

A pixel is a uint32 as Pillow stores it: red in the low byte, then green, blue and a byte of no
meaning. Sums are int32 as in Pillow, and each step is cast back to 32 bits, because numba would
widen it to 64 and halve what one instruction does. Taps come in fours (see `resample.table`).
"""

from __future__ import annotations

import numpy as np
from numba import config, njit, types

from vision_exp.resample import HALF, PRECISION

if config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set, and uncompiled loops would take minutes")

#: Rows that `across` works on at once: 64 bytes, a whole number of vectors on every processor.
STRIPE = 16
#: Pixels of a patch's side: a constant, so that its loops have no end to look for.
PATCH = 14

_LANES = STRIPE * 4
_PAIRS = PATCH // 2
_SCALE = np.float32(1 / 255)
_I = np.int32
_U = np.uint32


def _array(kind: types.Type, dimensions: int, readonly: bool = False) -> types.Array:
    return types.Array(kind, dimensions, "C", readonly=readonly)


_BYTES, _PIXELS = _array(types.uint8, 2), _array(types.uint32, 2)
_READ_PIXELS = _array(types.uint32, 2, readonly=True)
_READ_PAIRS = _array(types.uint64, 2, readonly=True)
_TABLE = _array(types.int32, 2)
_VALUES = _array(types.uint16, 2)
_INT = types.int64


@njit
def _four(b0, b1, b2, b3, w0, w1, w2, w3):  # type: ignore[no-untyped-def]
    return _I(_I(_I(_I(b0) * w0) + _I(_I(b1) * w1)) + _I(_I(_I(b2) * w2) + _I(_I(b3) * w3)))


@njit
def _to_byte(total):  # type: ignore[no-untyped-def]
    return np.uint8(min(max(_I(total >> _I(PRECISION)), _I(0)), _I(255)))


@njit(types.void(_READ_PIXELS, _PIXELS, _INT), nogil=True, error_model="numpy")
def turn(rows, stripe, at):  # type: ignore[no-untyped-def]
    """Put ``rows`` (n, width) into the columns ``at`` to ``at + n`` of ``stripe`` (width, 16)."""
    fours = rows.shape[0] // 4 * 4
    for first in range(0, fours, 4):
        r0, r1, r2, r3 = rows[first], rows[first + 1], rows[first + 2], rows[first + 3]
        for x in range(rows.shape[1]):
            stripe[x, at + first] = r0[x]
            stripe[x, at + first + 1] = r1[x]
            stripe[x, at + first + 2] = r2[x]
            stripe[x, at + first + 3] = r3[x]
    for i in range(fours, rows.shape[0]):
        for x in range(rows.shape[1]):
            stripe[x, at + i] = rows[i, x]


@njit(types.void(_BYTES, _TABLE, _TABLE, _PIXELS), nogil=True, error_model="numpy")
def across(stripe, spans, weights, out):  # type: ignore[no-untyped-def]
    """Resample horizontally: ``stripe`` (width, 64) in bytes to ``out`` (16, new width)."""
    total = np.empty(_LANES, np.int32)
    done = np.empty(_LANES, np.uint8)
    pixels = done.view(np.uint32)
    for x in range(spans.shape[0]):
        for j in range(_LANES):
            total[j] = _I(HALF)
        for k in range(0, spans[x, 1], 4):
            at = spans[x, 0] + k
            w0, w1, w2, w3 = weights[x, k], weights[x, k + 1], weights[x, k + 2], weights[x, k + 3]
            s0, s1, s2, s3 = stripe[at], stripe[at + 1], stripe[at + 2], stripe[at + 3]
            for j in range(_LANES):
                total[j] = _I(total[j] + _four(s0[j], s1[j], s2[j], s3[j], w0, w1, w2, w3))
        for j in range(_LANES):
            done[j] = _to_byte(total[j])
        for i in range(STRIPE):
            out[i, x] = pixels[i]


@njit(types.void(_BYTES, _TABLE, _TABLE, _INT, _BYTES), nogil=True, error_model="numpy")
def down(ring, spans, weights, first, out):  # type: ignore[no-untyped-def]
    """Resample vertically: rows ``first`` on of the result, in bytes, to all of ``out``.

    ``ring`` holds source row r, in bytes, at r modulo its height.
    """
    length = ring.shape[1]
    size = ring.shape[0]
    total = np.empty(length, np.int32)
    for i in range(out.shape[0]):
        y = first + i
        for j in range(length):
            total[j] = _I(HALF)
        for k in range(0, spans[y, 1], 4):
            at = spans[y, 0] + k
            w0, w1, w2, w3 = weights[y, k], weights[y, k + 1], weights[y, k + 2], weights[y, k + 3]
            r0, r1 = ring[at % size], ring[(at + 1) % size]
            r2, r3 = ring[(at + 2) % size], ring[(at + 3) % size]
            for j in range(length):
                total[j] = _I(total[j] + _four(r0[j], r1[j], r2[j], r3[j], w0, w1, w2, w3))
        row = out[i]
        for j in range(length):
            row[j] = _to_byte(total[j])


@njit(types.void(_READ_PAIRS, _VALUES), nogil=True, error_model="numpy")
def place(band, out):  # type: ignore[no-untyped-def]
    """14 rows of whole patches, pixels in pairs (14, w * 7), to bfloat16 in the order of patches.

    ``out`` (w * 3, 196) gets the bits of float32 ``(2 x - 255) * (1 / 255)``, rounded to nearest,
    ties to even. A patch's pixels are put in order first, so that values are written in order.
    """
    ordered = np.empty(PATCH * _PAIRS, np.uint64)
    pixels = ordered.view(np.uint32)
    for column in range(band.shape[1] // _PAIRS):
        for i in range(PATCH):
            row = band[i, column * _PAIRS :]
            for j in range(_PAIRS):
                ordered[i * _PAIRS + j] = row[j]
        for channel in range(3):
            values, shift = out[column * 3 + channel], _U(8 * channel)
            for j in range(PATCH * PATCH):
                byte = _I(_U(pixels[j] >> shift) & _U(255))
                value = np.float32(_I(_I(byte + byte) - _I(255))) * _SCALE
                bits = np.float32(value).view(np.uint32)
                odd = _U(_U(bits >> _U(16)) & _U(1))
                values[j] = np.uint16(_U(_U(bits + _U(0x7FFF)) + odd) >> _U(16))
