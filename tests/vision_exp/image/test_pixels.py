"""The fast way from pixels to patches: the plain way's bits, or not used at all."""

from __future__ import annotations

import ast
import logging
import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import PIL
import plain_child
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from vision_exp.image import pixels, raw, resample

CHILD = Path(__file__).parent / "in_vllm" / "child_pixels.py"
REPO = CHILD.parents[4]
PILLOW = int(PIL.__version__.split(".")[0])


@pytest.fixture
def kernels():
    return pixels.warm().kernels


@pytest.fixture
def log():
    """Messages of our logger. Not caplog: vLLM, where it is imported, keeps them from the root."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    pixels.logger.addHandler(handler)
    yield messages
    pixels.logger.removeHandler(handler)


def noise(width: int, height: int) -> Image.Image:
    data = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(data)


def same(image: Image.Image, grid: tuple[int, int], stretch: bool = False) -> bool:
    """Whether both ways give the same bits, or both raise ValueError as an older Pillow does."""
    fitted = resample.fitted_size(image.size, (grid[1] * 14, grid[0] * 14))
    if PILLOW < 13 and not stretch and min(fitted) < 1:
        for way in (pixels.PLAIN, pixels.warm()):
            with pytest.raises(ValueError, match="height and width must be > 0"):
                pixels.patches_of(image, grid, 14, way=way)
        return True
    plain, fast = (
        pixels.patches_of(image, grid, 14, stretch=stretch, way=way).view(torch.int16)
        for way in (pixels.PLAIN, pixels.warm())
    )
    return fast.is_contiguous() and torch.equal(plain, fast)


def test_the_fast_way_runs_here():
    """Else every comparison below would compare the plain way with itself."""
    way = pixels.warm()
    assert way.kernels is not None
    assert way.resamples
    assert way.vertical_first == (PILLOW >= 13)
    assert pixels.warm() is way


#: Sides from 1 to 1,000 with as many small ones as large ones.
SIDES = st.floats(0, 3).map(lambda power: round(10**power))


@settings(max_examples=400, deadline=None)
@given(width=SIDES, height=SIDES, rows=st.integers(1, 24), columns=st.integers(1, 24))
@example(width=1, height=1, rows=1, columns=1)
@example(width=1, height=1000, rows=24, columns=1)
@example(width=1000, height=1, rows=1, columns=24)
@example(width=28, height=42, rows=3, columns=2)  # fits as it is
@example(width=28, height=40, rows=3, columns=2)  # one side fits
@example(width=26, height=42, rows=3, columns=2)
def test_any_size_equals_pillow(width, height, rows, columns):
    image = noise(width, height)
    assert same(image, (rows, columns), stretch=True)
    assert same(image, (rows, columns))


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((1920, 1080), (42, 74)),
        ((1080, 2400), (73, 33)),
        ((3840, 2160), (42, 74)),
        ((4001, 3001), (48, 65)),
        ((512, 4096), (95, 12)),
        ((20000, 30), (6, 560)),
        ((30, 20000), (560, 6)),
        ((resample.LONGEST, 3), (2, 40)),
        ((resample.LONGEST + 1, 3), (2, 40)),  # Pillow's own work
    ],
)
def test_large_sizes_equal_pillow(size, grid):
    assert same(noise(*size), grid)
    assert same(noise(*size), grid, stretch=True)


@settings(max_examples=200, deadline=None)
@given(
    width=SIDES,
    height=SIDES,
    rows=st.integers(1, 24),
    columns=st.integers(1, 24),
    piece=st.sampled_from([1, 5000]),
    block=st.sampled_from([1, 50_000]),
)
@example(width=40, height=500, rows=4, columns=3, piece=1, block=1)  # a vertical pass first
@example(width=100, height=3000, rows=33, columns=3, piece=5000, block=50_000)  # 15 rows, then 17
def test_how_the_rows_are_cut_changes_nothing(width, height, rows, columns, piece, block):
    image = noise(width, height)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pixels, "_PIECE", piece)
        patch.setattr(pixels, "_BLOCK", block)
        assert same(image, (rows, columns), stretch=True)
        assert same(image, (rows, columns))


def test_passes_change_places_where_pillow_changes_them():
    """Around the place: a height that shrinks by twice what the width shrinks by."""
    for narrower in (-3, -1, 0, 1, 4):
        for shorter in range(max(0, 2 * narrower - 2), max(0, 2 * narrower) + 3):
            image = noise(28 + narrower, 28 + shorter)
            assert same(image, (2, 2), stretch=True), (narrower, shorter)


def test_values_at_the_ends_are_clipped():
    """Black and white checks overshoot both ways when they are resampled."""
    checks = np.indices((90, 130)).sum(0) // 5 % 2 * 255
    image = Image.fromarray(np.stack([checks, 255 - checks, checks], -1).astype(np.uint8))
    assert same(image, (3, 5))
    assert same(image, (12, 15))


def test_numba_missing(monkeypatch, log):
    monkeypatch.delitem(sys.modules, "vision_exp.image.kernels", raising=False)
    monkeypatch.delattr("vision_exp.image.kernels", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    assert pixels._find_way() is pixels.PLAIN
    (line,) = log
    assert line.startswith("[vision-exp] pictures are prepared by Pillow, which is slower: Module")


def test_the_switch_leaves_it_to_pillow_without_a_word(monkeypatch, log):
    monkeypatch.setenv(pixels.SWITCH, "0")
    assert pixels._find_way() is pixels.PLAIN
    assert not log


def test_numba_that_does_not_compile(monkeypatch, log):
    import numba

    monkeypatch.delitem(sys.modules, "vision_exp.image.kernels", raising=False)
    monkeypatch.delattr("vision_exp.image.kernels", raising=False)
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert pixels._find_way() is pixels.PLAIN

    def broken(*_, **__):
        raise RuntimeError("no target for this processor")

    monkeypatch.setattr(numba.config, "DISABLE_JIT", 0)
    monkeypatch.setattr(numba, "njit", broken)
    assert pixels._find_way() is pixels.PLAIN
    assert ["NUMBA_DISABLE_JIT" in line for line in log] == [True, False]
    assert log[1].endswith("RuntimeError: no target for this processor")


def test_a_pillow_that_resamples_otherwise(monkeypatch, log, kernels):
    """Its own resize is used, and only what follows is compiled."""
    resize = Image.Image.resize

    def sharper(self, size, resample=None, *args, **kwargs):
        return resize(self, size, Image.Resampling.LANCZOS, *args, **kwargs)

    monkeypatch.setattr(Image.Image, "resize", sharper)
    way = pixels._find_way()
    assert way == pixels.Way(kernels)
    assert log == [
        "[vision-exp] pictures are resized by Pillow, which is slower: this Pillow resamples in "
        "another way"
    ]
    image = noise(300, 200)
    fitted = ImageOps.pad(image, (140, 140), color=(127, 127, 127))
    got = pixels.patches_of(image, (10, 10), 14, way=way)
    assert torch.equal(got, pixels.patches_of(fitted, (10, 10), 14, way=pixels.PLAIN))


def test_each_probe_matters_enough(monkeypatch):
    """One weight that is off by 2 ** -8, or the other order of passes, is seen by the probes."""
    found = pixels.warm()
    other = pixels.Way(found.kernels, True, not found.vertical_first)
    results = [pixels._same(other, pixels._noise(*s), g, how) for s, g, how in pixels._PROBES]
    assert 0 < results.count(False) < len(results)
    table = resample.table

    def off(old, new):
        made = table(old, new)
        weights = made.weights.copy()
        weights[new // 2, 0] += 1 << (resample.PRECISION - 8)
        return resample.Table(made.spans, weights)

    monkeypatch.setattr(resample, "table", off)
    assert not pixels._find_way().resamples


def test_compiled_loops_with_other_bits(monkeypatch, log, kernels):
    def place_bands(rows, first, out):
        original(rows, first, out)
        out[first, 0, 0] ^= 1

    original = kernels.place_bands
    monkeypatch.setattr(kernels, "place_bands", place_bands)
    assert pixels._find_way() is pixels.PLAIN
    assert "compiled loops give other bits here" in log[0]


def test_a_pillow_whose_encoder_is_called_otherwise(monkeypatch, log):
    encoder = Image._getencoder

    def stricter(mode, name, args, *more):
        if args == "RGBX":
            raise TypeError("args must be a tuple")
        return encoder(mode, name, args, *more)

    monkeypatch.setattr(Image, "_getencoder", stricter)
    assert pixels._find_way() is pixels.PLAIN
    assert log[0].endswith("TypeError: args must be a tuple")


def test_threads_that_warm_at_once_compile_once(monkeypatch):
    calls = []
    find, started = pixels._find_way, threading.Barrier(8)

    def slow():
        calls.append(1)
        threading.Event().wait(0.05)
        return find()

    monkeypatch.setattr(pixels, "_find_way", slow)
    monkeypatch.setattr(pixels, "_warm", False)
    ways = []

    def one():
        started.wait(10)
        ways.append(pixels.warm())

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(calls) == 1
    assert len(ways) == 8
    assert all(way is ways[0] and way.resamples for way in ways)


def test_a_fork_while_another_thread_compiles(monkeypatch, log):
    """Nobody would let go of the lock there: Pillow does the work, and the log says so."""
    monkeypatch.setattr(pixels, "_warm", False)
    held = pixels._lock
    with held:
        child = os.fork()
        if not child:
            status = 1
            try:
                signal.alarm(10)
                plain = pixels.warm() is pixels.PLAIN and same(noise(40, 30), (2, 3))
                status = 0 if plain and log[0].endswith("forked while its parent compiled") else 3
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pixels._lock is held
    assert not pixels._torn


@pytest.mark.parametrize("size", [(900, 700), (33, 44)])
def test_a_picture_that_another_thread_changes_meanwhile(monkeypatch, size):
    """Its size and its pixels stay those it had: loops that write by another size would crash."""
    image, grid = noise(300, 200), (6, 9)
    expected = pixels.patches_of(image.copy(), grid, 14, way=pixels.PLAIN)
    table = resample.table

    def meanwhile(old, new):
        image.im, image._size = noise(*size).im, size
        return table(old, new)

    monkeypatch.setattr(resample, "table", meanwhile)
    assert torch.equal(pixels.patches_of(image, grid, 14, way=pixels.warm()), expected)


@pytest.mark.parametrize("size", [(1, 1), (3, 700), (40_000, 2), (1036, 588)])
@pytest.mark.parametrize("rows", [1, 3, 588])
def test_raw_pieces_are_those_of_tobytes(size, rows):
    image = noise(*size)
    pieces = list(raw.pieces(image, "RGB", rows))
    assert b"".join(pieces) == image.tobytes()
    assert {len(piece) for piece in pieces[:-1]} <= {rows * 3 * image.width}
    assert len(pieces) == -(-image.height // rows)


def test_only_the_kernels_import_numba():
    """A text-only model must not pay for it, nor a process that never warms."""
    importers = {}
    for path in sorted((REPO / "vision_exp").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(alias.name for alias in node.names)]
            for name in names:
                name = f"vision_exp.image.{name}" if name == "kernels" else name
                if name.split(".")[0] == "numba" or "image.kernels" in name:
                    importers.setdefault(path.name, set()).add(name)
    assert importers == {"kernels.py": {"numba"}, "pixels.py": {"vision_exp.image.kernels"}}


def test_in_a_process_of_its_own():
    """No numba before `warm`; threads, a fork after it, and the largest picture within bounds."""
    report = plain_child.report(CHILD, timeout=300)
    assert report["numba_before"] is False
    assert report["numba_after"] is True
    assert report["threads_equal"] is True
    assert report["fork_status"] == 0
    assert report["largest_equal"] is True
    assert report["added_mib"] < 32, report
