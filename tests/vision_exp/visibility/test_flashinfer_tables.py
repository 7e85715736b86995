"""The real FlashInfers say which rows their SM120 kernel takes, each in its own form.

Their Python sources are imported as published; what those import of the rest of FlashInfer, and of
compiled kernels, is stood for by objects that take everything.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import wheel_files

from vision_exp.visibility import sm120, support

TABLE = "flashinfer.mla._sparse_mla_sm120"


class Anything:
    """A decorator, a function, a class: whatever an import needs."""

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return ()


class Stub(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        vars(module)["__getattr__"] = Anything().__getattr__
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


class Published(MetaPathFinder):
    """FlashInfer from a folder of `flashinfer/mla`, stubs for the rest of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in ("flashinfer", "flashinfer.mla"):
            # Their own __init__ import all of FlashInfer.
            spec = ModuleSpec(name, Stub(), is_package=True)
            spec.submodule_search_locations = [str(self.folder.joinpath(*name.split(".")))]
            return spec
        if not name.startswith("flashinfer."):
            return None
        inside = self.folder.joinpath(*name.split(".")[:-1])
        found = PathFinder.find_spec(name, [str(inside)])
        if found is None and name.startswith(TABLE.rpartition(".")[0]):
            return None
        return found or importlib.util.spec_from_loader(name, Stub())


@contextmanager
def installed(version: str) -> Iterator[None]:
    def wanted(name: str) -> bool:
        return name.startswith("flashinfer/mla/") and name.endswith(".py")

    finder = Published(wheel_files.fetched("flashinfer-python", version, wanted))
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if of_flashinfer(name)}
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if of_flashinfer(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def of_flashinfer(name: str) -> bool:
    return name.partition(".")[0] == "flashinfer"


@pytest.mark.parametrize(
    ("version", "form"),
    [
        ("0.6.13", "NoneType"),
        ("0.6.14", "frozenset"),
        ("0.6.16", "frozenset"),
        ("0.6.18", "frozenset"),
        ("0.7.0.post1", "_DecodeDispatchEnvelope"),
        ("0.7.2.post1", "_DecodeDispatchEnvelope"),
        ("0.7.4", "_DecodeDispatchEnvelope"),
    ],
)
def test_wide_rows_of_images_have_a_kernel_wherever_flashinfer_has_one(
    version: str, form: str
) -> None:
    with installed(version):
        table = support.sm120_table()
        assert type(table).__name__ == form
        for heads in (8, 16, 32, 64, 128):
            reason = support.sm120_reason(table, heads, 512)
            if table is None:
                assert reason == "flashinfer-has-no-sm120-sparse-mla"
            else:
                assert reason is None
        if table is not None:
            assert support.sm120_reason(table, 129, 512) == (
                "flashinfer-sm120-has-no-kernel-for-129-heads-512-keys"
            )


CU = "flashinfer/data/csrc/sparse_mla_sm120"
#: Checks in the source that a call meets: one more is one that nobody here has read.
CHECKS = {"0.6.14": 19, "0.6.18": 19, "0.7.0.post1": 33, "0.7.2.post1": 41, "0.7.4": 41}


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3])


@pytest.mark.parametrize("version", CHECKS)
def test_the_table_of_checks_has_flashinfers_own_lines(version: str) -> None:
    python = wheel_files.fetched("flashinfer-python", version, lambda name: False)
    folder = python / "flashinfer" / "mla"
    files = [p for p in folder.rglob("*.py") if "_sparse_mla_sm120" in str(p)]
    end = "/attention_validation.h" if numbers(version) > (0, 7, 0) else "_jit_binding.cu"
    source = wheel_files.fetched("flashinfer-python", version, lambda n: n == CU + end, "-csrc")
    texts = {"PY": "\n".join(p.read_text() for p in files), "CU": (source / (CU + end)).read_text()}
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in (sm120.__doc__ or "").splitlines()
        if line.startswith(("| PY", "| CU"))
    ]
    assert len(rows) == 21
    held = 0
    for where, between, line, kept in rows:
        first, last = map(numbers, between.split())
        if first <= numbers(version) <= last:
            held += 1
            assert line.strip("`") in texts[where], line
            assert kept
    assert held >= 9
    assert texts["CU"].count("TVM_FFI_ICHECK") == CHECKS[version]
