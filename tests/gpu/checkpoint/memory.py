"""Whether the float32 reference fits, before anything is changed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch


class TooLittleMemory(MemoryError):
    """The float32 reference does not fit."""


def check_memory(folder: Path, device: str) -> None:
    """TooLittleMemory where the float32 values of the folder may not fit."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    # FP4 grows eightfold, FP8 fourfold and BF16 twofold; a stack of experts is held twice.
    wanted = 8 * index["metadata"]["total_size"]
    if device.startswith("cuda"):
        free = torch.cuda.mem_get_info()[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        known = Path("/proc/meminfo")
        if known.exists():
            lines = dict(line.split(":") for line in known.read_text().splitlines())
            free = int(lines["MemAvailable"].split()[0]) * 1024
    if free < wanted:
        raise TooLittleMemory(
            f"the float32 reference may need {wanted / 2**30:.1f} GiB and {free / 2**30:.1f} GiB "
            "are free; nothing was changed; free memory, or write fewer experts"
        )
