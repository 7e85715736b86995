"""How long the set-up of the tests waits for downloads, told apart from its own work."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "VISION_EXP_TEST_DOWNLOADS"


@contextmanager
def downloading() -> Iterator[None]:
    """Adds the seconds of the block as a line to the file that VARIABLE names, if it names one."""
    started = time.monotonic()
    try:
        yield
    finally:
        if name := os.environ.get(VARIABLE):
            with Path(name).open("a") as file:
                file.write(f"{time.monotonic() - started:.1f}\n")
