"""Replaces tensors of a checkpoint folder where they lie, without writing the shards again."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import torch


def read(folder: Path, name: str) -> torch.Tensor:
    """One tensor of the folder. Raises KeyError where the index does not name it."""
    from safetensors import safe_open

    with safe_open(_shard(folder, name), framework="pt") as file:
        return file.get_tensor(name)


def replace(folder: Path, name: str, value: torch.Tensor) -> None:
    """Puts ``value`` in the place of ``name``, in the dtype that the file gives it.

    The file's header holds each tensor's place (https://github.com/huggingface/safetensors#format).
    Raises ValueError for another shape.
    """
    old = read(folder, name)
    if old.shape != value.shape:
        raise ValueError(f"{name} is {tuple(old.shape)}, not {tuple(value.shape)}")
    raw = value.detach().cpu().to(old.dtype).contiguous().view(torch.uint8)
    with _shard(folder, name).open("r+b") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        start, stop = json.loads(file.read(size))[name]["data_offsets"]
        file.seek(8 + size + start)
        if file.write(memoryview(raw.numpy()).cast("B")) != stop - start:
            raise ValueError(f"{name} was not written whole")


def _shard(folder: Path, name: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][name]
