"""Which of vLLM's functions the overlay has wrapped in this process: looks at all of them."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

KINDS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)


def record() -> dict[str, Any]:
    """`wrapped`: function -> its wrappers, outermost first. `missing`: module -> why not imported.

    First imports what wrappers still wait for, as far as this release and machine have it.
    """
    from vision_exp import patching

    missing = {}
    for name in list(patching._pending):
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing[name] = str(error)
    wrapped = {}
    seen: set[int] = set()
    for where, owner, name in attributes():
        found = vars(owner)[name]
        if isinstance(found, KINDS) and id(found) not in seen:
            seen.add(id(found))
            wrappers = patching.wrappers(owner, name)
            if wrappers:
                wrapped[f"{where}{name}"] = [full_name(one) for one in wrappers]
    return {"wrapped": wrapped, "missing": missing}


def attributes() -> Iterator[tuple[str, Any, str]]:
    """(prefix of the full name, owner, name) of what stands in vLLM's modules and classes."""
    classes: dict[type, None] = {}
    for module_name, module in sorted(sys.modules.items()):
        if module_name.split(".")[0] != "vllm" or not isinstance(module, types.ModuleType):
            continue
        for name, value in list(vars(module).items()):
            yield f"{module_name}:", module, name
            if isinstance(value, type) and value.__module__.split(".")[0] == "vllm":
                classes[value] = None
    for one in classes:
        for name in list(vars(one)):
            yield f"{one.__module__}:{one.__qualname__}.", one, name


def full_name(wrapper: Callable[..., Any]) -> str:
    function = getattr(wrapper, "func", wrapper)  # of a partial
    return f"{function.__module__}.{function.__qualname__}"
