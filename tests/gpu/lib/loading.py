"""Which tensors of a checkpoint are written into a model while vLLM loads it.

What a loader returns are names of parameters, of which several tensors may share one. So the
writes themselves are watched: a tensor that is handed out and put nowhere has no home.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu.lib.rig import replaced
from torch.overrides import TorchFunctionMode

_WRITES = {"copy_", "fill_", "__setitem__"}


@dataclass
class Load:
    """One model's loading: the tensors handed to it, and those of them that it wrote somewhere."""

    model: str
    given: list[str] = field(default_factory=list)
    written: set[str] = field(default_factory=set)


class _Watch(TorchFunctionMode):
    """Notes the last tensor handed out whenever something is written into the model."""

    def __init__(self, load: Load, model: torch.nn.Module) -> None:
        super().__init__()
        held = [*model.parameters(), *model.buffers()]
        self.load = load
        self.homes = {each.untyped_storage().data_ptr() for each in held}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in _WRITES and self.load.given:
            target = args[0]
            if target.untyped_storage().data_ptr() in self.homes:
                self.load.written.add(self.load.given[-1])
        return func(*args, **(kwargs or {}))


@contextmanager
def watched_loading(loader: Any = None) -> Iterator[list[Load]]:
    """Watches what vLLM's loader of safetensors loads until the block ends, drafts too."""
    if loader is None:
        from vllm.model_executor.model_loader import default_loader

        loader = default_loader.DefaultModelLoader
    loads: list[Load] = []
    load_weights, all_weights = loader.load_weights, loader.get_all_weights

    def watching(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        loads.append(Load(type(model).__name__))
        with _Watch(loads[-1], model):
            return load_weights(self, model, *args, **kwargs)

    def handing_out(self: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in all_weights(self, *args, **kwargs):
            loads[-1].given.append(name)
            yield name, tensor

    with (
        replaced(loader, "load_weights", watching),
        replaced(loader, "get_all_weights", handing_out),
    ):
        yield loads


def assess_loading(
    names: set[str], loads: list[Load], homeless: dict[str, str]
) -> tuple[bool, str]:
    """Every one of a checkpoint's ``names`` was handed out and written, or is said to be homeless.

    ``homeless``: patterns of the names that must not have been written, and why.
    """
    given = {name for load in loads for name in load.given}
    written = {name for load in loads for name in load.written}
    lost = names - written
    words = [
        f"{len(written & names)} of {len(names)} tensors written by "
        f"{', '.join(load.model for load in loads) or 'nothing'}"
    ]
    for pattern, why in homeless.items():
        found = {name for name in names if re.fullmatch(pattern, name)}
        if found & written:
            return False, f"{_some(found & written)} written, though {why}"
        lost -= found
        words.append(f"{len(found)} not, {why}")
    if lost:
        words.append(f"without a home: {_some(lost)}")
    if names - given:
        words.append(f"never handed out: {_some(names - given)}")
    return not lost and names <= given and bool(written), "; ".join(words)


def _some(names: set[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")


def names_in(folder: Path) -> set[str]:
    """Names in a checkpoint's index."""
    return set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"])


def hash_biases(folder: Path) -> dict[str, str]:
    """The layers that choose experts by a table of token ids have a bias that nothing reads."""
    count = json.loads((folder / "config.json").read_text())["num_hash_layers"]
    layers = "|".join(str(layer) for layer in range(count)) or "none"
    return {rf"layers\.({layers})\.ffn\.gate\.bias": "hash layers route without a bias"}


#: What a target leaves to its draft.
DRAFTS = {r"mtp\..*": "the drafts' own"}
#: What vLLM's DSpark draft leaves out before 0.28.
_CONFIDENCE = {r"mtp\.\d+\.confidence_head\..*": "vLLM drafts without the confidence head"}


def unused_by_draft(dspark: str) -> dict[str, str]:
    """What the draft drops of a checkpoint, by the source text of vLLM's ``dspark.py``.

    Asked of the source and not of the loaded draft: that removes a head for which it got no tensor.
    """
    return {} if "DSparkConfidenceHead(" in dspark else _CONFIDENCE
