"""Builds vLLM's own DeepSeek-V4 model in small sizes on a CPU, with its attention left out.

What vLLM cannot do without a GPU is replaced: CUDA streams and events, and the attention class.
Everything else (registry, construction, MoE, weight loading) is the release's own.
"""

from __future__ import annotations

import copy
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cpu_experts
import rocm_stand_in
import torch
from gpu.checkpoint.tensors import specs, tensor
from rig_model import Rig
from safetensors import safe_open
from safetensors.torch import save_file

SIZES = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "vision_dim": 64,
    "vision_inter_dim": 48,
    "expert_dtype": "bf16",
}


class _Nothing:
    """Stands for a CUDA stream or event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class _NoAttention(torch.nn.Module):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @staticmethod
    def get_padded_num_q_heads(heads: int) -> int:
        return heads


def _folder(rig: Rig, name: str, overrides: dict[str, Any]) -> Path:
    layers = overrides.get("num_hidden_layers", 4)
    return rig.checkpoint(name, **{**SIZES, "compress_ratios": [0] * (layers + 3), **overrides})


def config(rig: Rig, name: str) -> Any:
    return rig.model_config(_folder(rig, name, {})).hf_config


@cache
def _without_gpu() -> None:
    torch.cuda.Stream = torch.cuda.Event = _Nothing
    import vllm.models.deepseek_v4.nvidia.model as module

    cpu_experts.select_outside()
    if hasattr(module, "_select_dsv4_attn_cls"):
        module._select_dsv4_attn_cls = lambda *args, **kwargs: _NoAttention
    else:  # 0.22
        module.DeepseekV4Attention = _NoAttention


@cache
def _join(ranks: int, rank: int, store: Path | None) -> None:
    """Make this process one of `ranks` tensor-parallel ranks that meet at the file `store`."""
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    store = store or Path(tempfile.mkdtemp()) / "store"
    init_distributed_environment(ranks, rank, f"file://{store}", rank, "gloo")
    initialize_model_parallel(ranks, 1)


def build(
    rig: Rig,
    name: str,
    *,
    model_options: dict[str, Any] | None = None,
    ranks: int = 1,
    rank: int = 0,
    store: Path | None = None,
    **overrides: Any,
) -> Any:
    """An instance of the class that the registry gives for the checkpoint `name`."""
    folder = _folder(rig, name, overrides)
    return _build(rig, folder, model_options or {}, (ranks, rank, store))


def build_text(rig: Rig) -> Any:
    """An instance for a text-only checkpoint of the same sizes."""
    folder = rig.text_checkpoint("small-text", **SIZES, compress_ratios=[0] * 7)
    return _build(rig, folder, {}, (1, 0, None))


@contextmanager
def on_rocm(rig: Rig) -> Iterator[dict[str, Any]]:
    """The modules of amd/, on what says that it is ROCm."""
    build(rig, "small")  # imports the experts' modules, which are to go on finding a CPU
    found = rocm_stand_in.modules()
    found["model"].DeepseekV4ROCMAiterMLAAttention = _NoAttention
    with rocm_stand_in.platform():
        yield found


def build_with(rig: Rig, name: str, model_class: type, *, text: bool = False, **more: Any) -> Any:
    """An instance of a class of vLLM's for the checkpoint `name`; `build` asks the registry."""
    make = rig.text_checkpoint if text else rig.checkpoint
    layers = more.get("num_hidden_layers", 4)
    folder = make(name, **{**SIZES, "compress_ratios": [0] * (layers + 3), **more})
    return _build(rig, folder, {}, (1, 0, None), model_class)


def draft(rig: Rig, name: str, model_class: type, model_type: str) -> Any:
    """A draft of this class for the checkpoint `name`, made as for the config of a target."""
    from vllm.config import VllmConfig, set_current_vllm_config

    vllm_config = VllmConfig(model_config=rig.model_config(_folder(rig, name, {})))
    hf_config = copy.copy(vllm_config.model_config.hf_config)
    hf_config.model_type = model_type
    draft_config = SimpleNamespace(hf_config=hf_config)
    with set_current_vllm_config(vllm_config):
        _join(1, 0, None)
        vllm_config.__dict__["speculative_config"] = SimpleNamespace(
            draft_model_config=draft_config, num_speculative_tokens=1
        )
        torch.set_default_dtype(torch.bfloat16)
        try:
            return model_class(vllm_config=vllm_config)
        finally:
            torch.set_default_dtype(torch.float32)


def _build(
    rig: Rig,
    folder: Path,
    model_options: dict[str, Any],
    group: tuple[int, int, Path | None],
    model_class: type | None = None,
) -> Any:
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    # The launcher of other processes; here they are forked already.
    launcher = {"distributed_executor_backend": "external_launcher"} if group[0] > 1 else {}
    vllm_config = VllmConfig(
        model_config=rig.model_config(folder, **model_options),
        parallel_config=ParallelConfig(tensor_parallel_size=group[0], **launcher),
    )
    with set_current_vllm_config(vllm_config):
        _without_gpu()
        _join(*group)
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = initialize_model(vllm_config, model_class=model_class)
        finally:
            torch.set_default_dtype(torch.float32)
    for module in model.modules():
        if hasattr(module, "quant_method"):
            # What the CPU platform sets after loading, from packed copies of the weights.
            module.cpu_linear = torch.nn.functional.linear
    return model


def checkpoint(rig: Rig, name: str, **overrides: Any) -> dict[str, torch.Tensor]:
    """Random weights of the checkpoint `name`, written to disk once and read back from there."""
    return _weights(_folder(rig, name, overrides))


def text_checkpoint(rig: Rig) -> dict[str, torch.Tensor]:
    """Random weights of the text-only checkpoint of `build_text`."""
    return _weights(rig.folder / "small-text")


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    path = folder / "model.safetensors"
    if not path.exists():
        values = json.loads((folder / "config.json").read_text())
        made = {
            spec.name: tensor(spec, 0, values)
            for spec in specs(values)
            if not re.match(r"(layers|mtp)\.\d+\.attn\.", spec.name)
        }
        save_file(made, path)
    with safe_open(path, "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
