"""Native vLLM's vision tower as a reference: its file, loaded beside another vLLM's layers."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F

PATH = "vllm/models/deepseek_v4/common/vision.py"


def load(path: Path | str) -> ModuleType:
    """The module in such a file of a vLLM that serves the model by itself."""
    spec = importlib.util.spec_from_file_location("native_vision", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def one_rank() -> Iterator[None]:
    """A vLLM of one rank on a CPU, as its layers need it to be built."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        initialize_model_parallel(1)
        yield


def on_cpu(*modules: torch.nn.Module) -> None:
    """What vLLM does after loading weights, for its linear layers on a CPU."""
    for module in modules:
        for layer in module.modules():
            if hasattr(layer, "quant_method"):
                layer.cpu_linear = F.linear
