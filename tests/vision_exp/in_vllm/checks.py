"""Named checks that run in one child process of a real vLLM, reported to the parent as JSON."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_checks: dict[str, Callable[[Any], None]] = {}


def check(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """Register a check: a function of the shared rig that raises if something is wrong."""
    name = f"{function.__module__.removeprefix('checks_')}.{function.__name__}"
    if name in _checks:
        raise ValueError(f"two checks are called {name}")
    _checks[name] = function
    return function


def run(rig: Any, only: str = "", part: str = "") -> dict[str, Any]:
    """Run the checks that have not run yet: name -> None or the traceback.

    `only` and `part` pick those whose name holds both.
    """
    results: dict[str, Any] = {}
    for name, function in list(_checks.items()):
        if only not in name or part not in name:
            continue
        del _checks[name]
        start = time.monotonic()
        try:
            function(rig)
            results[name] = None
        except Exception:  # noqa: BLE001  reported by name to the parent, which fails
            results[name] = traceback.format_exc()
        print(f"{name}: {time.monotonic() - start:.2f} s", flush=True)
    return results


def write(path: str, **parts: Any) -> None:
    Path(path).write_text(json.dumps(parts, indent=1))


def equal(found: Any, expected: Any, what: str = "") -> None:
    if found != expected:
        raise AssertionError(f"{what}: found {found!r}, expected {expected!r}")


@contextmanager
def raises(
    kind: type[BaseException] | tuple[type[BaseException], ...], *texts: str
) -> Iterator[None]:
    """The body must raise `kind` with a message that holds every one of `texts`."""
    try:
        yield
    except kind as error:
        missing = [text for text in texts if text not in str(error)]
        if missing:
            raise AssertionError(f"{missing} not in: {error}") from error
        return
    raise AssertionError(f"nothing raised, expected {kind}")
