"""Triton's interpreter without what takes most of its time and changes no result.

A launch puts interpreted operations into `triton.language`; every call of a function inside it does
so again, which finds nothing left to do and is a third of the time of a kernel with many calls.
Here a launch does it once for each set of modules that its functions see. Triton 3.x,
runtime/interpreter.py, `InterpretedFunction.__call__` and `GridExecutor.__call__`.

It also works out for every integer operation whether it overflows, and tells nobody: its assertions
do nothing unless it debugs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from known_launches import Launches


def install() -> None:
    """For a process with TRITON_INTERPRET=1. A Triton built otherwise is left as it is.

    Raises RuntimeError where overflows are asserted.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    if options.debug:
        raise RuntimeError("overflows are asserted now: leave the checks in")
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    prepare: Callable[..., Any] | None = getattr(interpreter, "_patch_lang", None)
    function = getattr(interpreter, "InterpretedFunction", None)
    grid = getattr(interpreter, "GridExecutor", None)
    if prepare is None or function is None or grid is None or hasattr(prepare, "once"):
        return
    prepared: set[tuple[bool, bool]] = set()
    launch = grid.__call__

    def prepare_once(fn: Any) -> Any:
        seen = list(fn.__globals__.values())
        modules = (any(each is tl for each in seen), any(each is tl.core for each in seen))
        if modules in prepared:
            return interpreter._LangPatchScope()  # nothing changed, so nothing to give back
        prepared.add(modules)
        return prepare(fn)

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared.clear()
        return launch(self, *args, **kwargs)

    prepare_once.once = True  # type: ignore[attr-defined]
    interpreter._patch_lang, grid.__call__ = prepare_once, launched


def keep(launches: Launches) -> None:
    """Launches equal to one that `launches` has are not run again. After `install`.

    Memory that nobody wrote would differ each time: torch fills it.
    """
    from triton.runtime.interpreter import InterpretedFunction

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    run = InterpretedFunction.run

    def kept(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        arguments = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        launches.launch(
            self.fn, grid, arguments, lambda: run(self, *args, grid=grid, warmup=warmup, **kwargs)
        )

    InterpretedFunction.run = kept
