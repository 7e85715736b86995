"""Fetches a release's sources for `run.sh --sandbox`.

    python3 -m anchors.releases.sandbox VERSION DESTINATION

The destination then holds `vllm/` with the files that matter here, as the wheel ships them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from anchors.errors import ENVIRONMENT
from anchors.releases import wheels
from anchors.report import PREFIX


def main(version: str, destination: str) -> int:
    """Fetches unless it is there already; 6 with a message where the index does not give it."""
    folder = Path(destination)
    if folder.is_dir():
        return 0
    print(f"{PREFIX} fetching the sources of vLLM {version}", flush=True)
    try:
        (wheel,) = wheels.releases("vllm", [version])
        wheels.fetch(wheel, folder)
    except (wheels.WheelError, OSError) as error:
        hint = getattr(error, "hint", "") or f"{sys.executable} -m pip index versions vllm"
        print(
            f"{PREFIX} vLLM {version} cannot be fetched: {error}. Nothing was changed.",
            f"next: {hint}",
            sep="\n",
            file=sys.stderr,
        )
        return ENVIRONMENT
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:3]))
