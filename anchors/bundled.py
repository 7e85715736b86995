"""Unpacks the wheels that a bundle brings along, for the Python that runs this file.

    python3 bundled.py WHEELS_FOLDER DESTINATION

Exit 0 when LibCST can be imported from the destination afterwards, else 1.
"""

from __future__ import annotations

import glob
import os
import platform
import subprocess
import sys
import zipfile


def fitting(wheel: str) -> bool:
    """Whether the wheel's tags name this Python and machine, or any."""
    python, abi, place = os.path.basename(wheel).removesuffix(".whl").split("-")[-3:]
    tag = "cp{}{}".format(*sys.version_info[:2])
    right_python = tag in python.split(".") or "py3" in python.split(".") or abi == "abi3"
    return right_python and (place == "any" or place.endswith(platform.machine()))


def unpack(folder: str, destination: str) -> bool:
    """Unpacks what fits; whether LibCST can be imported then."""
    for wheel in sorted(glob.glob(os.path.join(glob.escape(folder), "*.whl"))):
        if fitting(wheel):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(destination)
    probe = subprocess.run(
        [sys.executable, "-c", "import libcst"],
        env={**os.environ, "PYTHONPATH": destination},
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    return probe.returncode == 0


if __name__ == "__main__":
    raise SystemExit(not unpack(sys.argv[1], sys.argv[2]))
