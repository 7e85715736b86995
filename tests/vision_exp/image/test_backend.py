"""Which backend a process gets, and why: the compiled loops only where they give Pillow's bits."""

from __future__ import annotations

import ast
import os
import signal
import sys
import threading
from pathlib import Path

import PIL
import plain_child
import torch
from PIL import Image, ImageOps
from sample_images import noise

from vision_exp import settings
from vision_exp.image import backend, pixels, resample
from vision_exp.image.pixels import PILLOW, ResizeBackend

CHILD = Path(__file__).parent / "in_vllm" / "child_pixels.py"
REPO = CHILD.parents[4]


def test_the_compiled_loops_run_here():
    """Else every comparison would compare Pillow with itself."""
    found = backend.warm_up()
    assert found.kernels is not None
    assert found.resamples
    assert found.vertical_first == (int(PIL.__version__.split(".")[0]) >= 13)
    assert backend.warm_up() is backend.current_backend() is found


def test_numba_missing(monkeypatch, log):
    monkeypatch.delitem(sys.modules, "vision_exp.image.kernels", raising=False)
    monkeypatch.delattr("vision_exp.image.kernels", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    assert backend.select_backend() is PILLOW
    (line,) = log
    assert line.startswith("[vision-exp] images are prepared by Pillow, which is slower: Module")


def test_the_switch_leaves_it_to_pillow_without_a_word(monkeypatch, log):
    monkeypatch.setenv(settings.FAST_PIXELS.name, "0")
    assert backend.select_backend() is PILLOW
    assert not log


def test_numba_that_does_not_compile(monkeypatch, log):
    import numba

    monkeypatch.delitem(sys.modules, "vision_exp.image.kernels", raising=False)
    monkeypatch.delattr("vision_exp.image.kernels", raising=False)
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert backend.select_backend() is PILLOW

    def broken(*_, **__):
        raise RuntimeError("no target for this processor")

    monkeypatch.setattr(numba.config, "DISABLE_JIT", 0)
    monkeypatch.setattr(numba, "njit", broken)
    assert backend.select_backend() is PILLOW
    assert ["NUMBA_DISABLE_JIT" in line for line in log] == [True, False]
    assert log[1].endswith("RuntimeError: no target for this processor")


def test_a_pillow_that_resamples_otherwise(monkeypatch, log, kernels):
    """Its own resize is used, and only what follows is compiled."""
    resize = Image.Image.resize

    def sharper(self, size, resample=None, *args, **kwargs):
        return resize(self, size, Image.Resampling.LANCZOS, *args, **kwargs)

    monkeypatch.setattr(Image.Image, "resize", sharper)
    found = backend.select_backend()
    assert found == ResizeBackend(kernels)
    assert log == [
        "[vision-exp] images are resized by Pillow, which is slower: this Pillow resamples in "
        "another way"
    ]
    image = noise(300, 200)
    fitted = ImageOps.pad(image, (140, 140), color=(127, 127, 127))
    got = pixels.patches_of(image, (10, 10), 14, found)
    assert torch.equal(got, pixels.patches_of(fitted, (10, 10), 14, PILLOW))


def test_each_probe_matters_enough(monkeypatch):
    """One weight that is off by 2 ** -8, or the other order of passes, is seen by the probes."""
    found = backend.warm_up()
    other = ResizeBackend(found.kernels, True, not found.vertical_first)
    results = [
        backend._same_bits(other, backend._noise(*size), grid, how)
        for size, grid, how in backend._PROBES
    ]
    assert 0 < results.count(False) < len(results)
    coefficients = resample.filter_coefficients

    def off(old, new):
        made = coefficients(old, new)
        weights = made.taps.copy()
        weights[new // 2, 0] += 1 << (resample.PRECISION - 8)
        return resample.FilterCoefficients(made.bounds, weights)

    monkeypatch.setattr(resample, "filter_coefficients", off)
    assert not backend.select_backend().resamples


def test_compiled_loops_with_other_bits(monkeypatch, log, kernels):
    def pack_patches(rows, top, left, band, out):
        original(rows, top, left, band, out)
        out[0, 0, 0] ^= 1

    original = kernels.pack_patches
    monkeypatch.setattr(kernels, "pack_patches", pack_patches)
    assert backend.select_backend() is PILLOW
    assert "compiled loops give other bits here" in log[0]


def test_a_pillow_whose_encoder_is_called_otherwise(monkeypatch, log):
    encoder = Image._getencoder

    def stricter(mode, name, args, *more):
        if args == "RGBX":
            raise TypeError("args must be a tuple")
        return encoder(mode, name, args, *more)

    monkeypatch.setattr(Image, "_getencoder", stricter)
    assert backend.select_backend() is PILLOW
    assert log[0].endswith("TypeError: args must be a tuple")


def test_threads_that_warm_at_once_compile_once(monkeypatch):
    calls = []
    find, started = backend.select_backend, threading.Barrier(8)

    def slow():
        calls.append(1)
        threading.Event().wait(0.05)
        return find()

    monkeypatch.setattr(backend, "select_backend", slow)
    monkeypatch.setattr(backend, "_backend", None)
    found = []

    def one():
        started.wait(10)
        found.append(backend.warm_up())

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(calls) == 1
    assert len(found) == 8
    assert all(one is found[0] and one.resamples for one in found)


def test_a_fork_while_another_thread_compiles(monkeypatch, log):
    """Nobody would let go of the lock there: Pillow does the work, and the log says so."""
    monkeypatch.setattr(backend, "_backend", None)
    held = backend._lock
    with held:
        child = os.fork()
        if not child:
            status = 1
            try:
                signal.alarm(10)
                plain = backend._same_bits(backend.warm_up(), noise(40, 30), (2, 3))
                plain &= backend.current_backend() is PILLOW
                status = 0 if plain and log[0].endswith("forked while its parent compiled") else 3
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert backend._lock is held
    assert not backend._forked_while_compiling


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
    assert importers == {"kernels.py": {"numba"}, "backend.py": {"vision_exp.image.kernels"}}


def test_in_a_process_of_its_own():
    """No numba before `warm_up`; threads, a fork after it, and the largest image within bounds."""
    report = plain_child.report(CHILD, timeout=300)
    assert report["numba_before"] is False
    assert report["numba_after"] is True
    assert report["threads_equal"] is True
    assert report["fork_status"] == 0
    assert report["largest_equal"] is True
    assert report["added_mib"] < 32, report
