"""What the checks of a child saw, as the JSON object of its last line; the parent judges it.

Check name -> ["saw", value], or ["failed", traceback]: one that fails leaves the others alone.
Names on the command line choose checks.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any


def report(*checks: Callable[[], Any]) -> None:
    found: dict[str, tuple[str, Any]] = {}
    for check in checks:
        name = check.__name__
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        try:
            found[name] = ("saw", check())
        except Exception:  # noqa: BLE001  reported by name to the parent, which fails
            found[name] = ("failed", traceback.format_exc())
    print(json.dumps(found, default=repr))
