"""Wrap functions of modules that may not be imported yet, without importing them.

`when_imported` runs a callback right after a module's import; `wrap` replaces one function, one
property or one object's method, once. What is wrapped stands in marks on the functions themselves,
which `wrappers` reads. Standard library only.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]

_MARK = "__vision_exp_wrapper__"

_lock = threading.RLock()
_pending: dict[str, list[Callback]] = {}
_done: set[tuple[str, Callback]] = set()


def _new_lock_after_fork() -> None:
    # Another thread of the parent may have held the lock at the moment of the fork.
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock_after_fork)


def when_imported(module_name: str, callback: Callback) -> None:
    """Run `callback(module)` once: now if `module_name` is imported, else right after its import.

    Callbacks run in the order in which they were registered. An exception in a callback fails
    the import that triggered it. The same (name, callback) pair registered again does nothing, so
    pass a module-level function. Raises RuntimeError if the calling thread is itself in the
    middle of importing that module: its names are not all bound, and no later moment is left.
    """
    with _lock:
        module = sys.modules.get(module_name)
        if module is None:
            _pending.setdefault(module_name, []).append(callback)
            if _finder not in sys.meta_path:
                sys.meta_path.insert(0, _finder)
            return
    if _initializing(module):
        # Another thread may be importing it: this waits for that thread.
        module = importlib.import_module(module_name)
        if _initializing(module):
            raise RuntimeError(f"{module_name} is only partly imported and cannot be wrapped yet")
    _run(module_name, callback, module)


def _initializing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _run(module_name: str, callback: Callback, module: ModuleType) -> None:
    with _lock:
        if (module_name, callback) in _done:
            return
        _done.add((module_name, callback))
    try:
        callback(module)
    except BaseException:
        _done.discard((module_name, callback))
        raise


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself; adds the callbacks to the loader that the other finders return."""

    def __init__(self) -> None:
        self._busy = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        busy: set[str] = self._busy.__dict__.setdefault("names", set())
        if fullname not in _pending or fullname in busy:
            return None
        busy.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            busy.discard(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            # Callbacks stay listed until the import succeeds, so a second attempt runs them too.
            for callback in tuple(_pending.get(fullname, ())):
                _run(fullname, callback, module)
            with _lock:
                _pending.pop(fullname, None)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _Finder()


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `owner.name` by `wrapper(original, *args, **kwargs)`, once; return the original.

    `owner` is a class, a module, or an object, whose bound method is then shadowed. Class and
    static methods stay such; for a class method, `wrapper` gets the class as its second argument.
    A property, cached or not, becomes one that calls `wrapper(original, self)` each time.
    Wrapping with the same `wrapper` again does nothing (pass a module-level function, a method or
    a partial of one); other wrappers stack. AttributeError if `name` is missing.
    """
    original, rebuild = _open(owner, name)
    for layer, known in _layers(original):
        if getattr(known, "func", known) == getattr(wrapper, "func", wrapper):
            return layer.__wrapped__

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(wrapped, _MARK, wrapper)
    setattr(owner, name, rebuild(wrapped))
    return original


def add_method(owner: type, name: str, method: Callable[..., Any]) -> None:
    """Give a class a method that it does not define itself; nothing happens if it does."""
    if name not in vars(owner):
        setattr(method, _MARK, method)
        setattr(owner, name, method)


def wrappers(owner: Any, name: str) -> tuple[Callable[..., Any], ...]:
    """What `wrap` and `add_method` have put in the place of `owner.name`, outermost first."""
    return tuple(wrapper for _, wrapper in _layers(_open(owner, name)[0]))


def _open(owner: Any, name: str) -> tuple[Any, Callable[[Any], Any]]:
    """The function behind `owner.name`, and what makes such an attribute of another function."""
    if not isinstance(owner, (type, ModuleType)):
        return getattr(owner, name), lambda function: function
    found = inspect.getattr_static(owner, name)
    if isinstance(found, (staticmethod, classmethod)):
        return found.__func__, type(found)
    if isinstance(found, property):
        return found.fget, property
    if isinstance(found, functools.cached_property):
        return found.func, property
    return found, lambda function: function


def _layers(function: Any) -> Iterator[tuple[Any, Callable[..., Any]]]:
    """(function, its wrapper) of every layer of ours, from the outside."""
    while function is not None:
        wrapper = getattr(function, "__dict__", {}).get(_MARK)
        if wrapper is not None:
            yield function, wrapper
        function = getattr(function, "__wrapped__", None)
