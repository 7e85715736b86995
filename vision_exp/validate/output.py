"""The result file: never one of an earlier run, never half of one."""

from __future__ import annotations

import json
import os
from typing import Any

from vision_exp.validate.usage import NOT_WRITTEN, USAGE, Options, Stop


def remove_old(options: Options) -> None:
    """What an earlier run wrote must not be taken for the result of this one.

    Devices and pipes stay. Raises Stop where it cannot be removed.
    """
    if options.json is None or not options.json.is_file():
        return
    try:
        options.json.unlink()
    except OSError as error:
        raise Stop(
            USAGE,
            f"--json {options.json}: the old file cannot be removed: {error.strerror}. "
            "Nothing was checked.",
            f"{options.without_file} --json FILE",
        ) from error


def write(options: Options, found: dict[str, Any]) -> None:
    """The result, whole or not at all. Raises Stop."""
    path = options.json
    if path is None:
        return
    text = json.dumps(found, indent=1) + "\n"
    beside = path.with_name(f".validate-{os.getpid()}.tmp")
    try:
        if path.exists():  # a device or pipe: what was a file is removed
            path.write_text(text)
            return
        try:
            beside.write_text(text)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise Stop(
            NOT_WRITTEN,
            f"--json {path} cannot be written: {error.strerror}. The result is above.",
            f"{options.without_file} --json FILE",
        ) from error
