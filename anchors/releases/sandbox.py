"""Fetches a release's sources for `run.sh --sandbox`.

    python3 -m anchors.releases.sandbox VERSION DESTINATION

The destination then holds `vllm/` with the files that matter here, as the wheel ships them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from anchors.errors import DONE, ENVIRONMENT, INTERRUPTED
from anchors.report import PREFIX


def main(version: str, destination: str) -> int:
    """Fetches unless it is there already; 6 with a message where the index does not give it.

    130 where it is interrupted, without words: run.sh has them.
    """
    try:
        failure = None if Path(destination).is_dir() else _fetch(version, Path(destination))
    except KeyboardInterrupt:
        return INTERRUPTED
    if failure:
        print(
            f"{PREFIX} vLLM {version} cannot be fetched: {failure}. Nothing was changed.",
            f"next: {getattr(failure, 'hint', '') or 'remove the cause, then run this again'}",
            sep="\n",
            file=sys.stderr,
        )
        return ENVIRONMENT
    return DONE


def _fetch(version: str, folder: Path) -> Exception | None:
    # Here, since it takes most of a second, in which an interrupt has to be met too.
    from anchors.releases import wheels

    try:
        (wheel,) = wheels.releases("vllm", [version])
        wheels.fetch(wheel, folder)
    except (wheels.WheelError, OSError) as error:
        return error
    return None


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:3]))
