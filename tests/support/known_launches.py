"""Launches of interpreted Triton kernels, kept for the next equal one.

vLLM's metadata kernels and ours are the same text in most releases, and get the same tensors there;
the interpreter takes seconds for each. A launch is equal to a former one when the kernel's source,
that of all it calls, the grid, the constants and every byte of its tensors' storages are: then the
storages become what they became before. Anything that differs, or is not understood, is run.
"""

from __future__ import annotations

import hashlib
import inspect
import numbers
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

# What a kernel's source can name without a text of its own.
LIBRARIES = ("triton", "builtins", "math")


class Unknown(Exception):
    """Something of a launch that cannot be compared with another's."""


class Launches:
    """The results of launches, as files of a folder. `repeated` counts those that were not run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.repeated = 0

    def launch(
        self,
        kernel: FunctionType,
        grid: object,
        arguments: Mapping[str, Any],
        run: Callable[[], None],
    ) -> None:
        """Does to the tensors in `arguments` what `run` does, by running it at most once."""
        tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
        storages = {each.untyped_storage().data_ptr(): _bytes(each) for each in tensors}
        order = list(storages)
        said = []
        try:
            said = [source(kernel), repr(grid) if isinstance(grid, tuple) else described(grid)]
            for name, value in arguments.items():
                if isinstance(value, torch.Tensor):
                    at = order.index(value.untyped_storage().data_ptr())
                    view = (at, value.storage_offset(), value.shape, value.stride(), value.dtype)
                    said.append(f"{name}={view} of {value.untyped_storage().nbytes()}")
                else:
                    said.append(f"{name}={described(value)}")
        except Unknown:
            run()
            return
        digest = hashlib.sha256("\n".join(said).encode())
        for data in storages.values():
            digest.update(data.numpy())
        file = self.folder / digest.hexdigest()
        if file.exists():
            self.repeated += 1
            for data, after in zip(storages.values(), torch.load(file), strict=True):
                data.copy_(after)
            return
        run()
        torch.save([data.clone() for data in storages.values()], file)


def source(kernel: FunctionType) -> str:
    """The text of a kernel, of the functions it calls, and the values it names.

    Raises Unknown for a name that is none of these.
    """
    found: dict[FunctionType, str] = {}
    waiting = [kernel]
    while waiting:
        function = waiting.pop()
        if function in found:
            continue
        named = inspect.getclosurevars(function)
        parts = [inspect.getsource(function)]
        for name, value in sorted({**named.globals, **named.nonlocals}.items()):
            called = getattr(value, "fn", None)  # one that triton.jit took
            if isinstance(called, FunctionType):
                waiting.append(called)
                parts.append(f"{name}: {called.__qualname__}")
            elif not _of_a_library(value):
                parts.append(f"{name}={described(value)}")
        found[function] = "\n".join(parts)
    return "\n".join(found.values())


def _of_a_library(value: object) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    return isinstance(value, (ModuleType, FunctionType, type)) and (
        str(name).partition(".")[0] in LIBRARIES
    )


def described(value: object) -> str:
    """A constant in words that are equal only for equal ones. Raises Unknown."""
    if type(value).__name__ == "constexpr":
        return f"constexpr {described(getattr(value, 'value', None))}"
    if value is None or isinstance(value, (numbers.Number, str)):
        return f"{type(value).__name__} {value!r}"
    if type(value).__module__ == "triton.language.core" and type(value).__name__ == "dtype":
        return f"dtype {value}"
    raise Unknown(type(value).__name__)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor, as bytes that it shares with it."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
