"""The worker class that failures_child.py gives to vLLM's MultiprocExecutor."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import tiny_runner
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker import worker_base

BLOCKS, BLOCK = 64, 256  # of the KV cache


class Worker(worker_base.WorkerBase):
    """One real tensor-parallel rank with tiny_runner.py's runner."""

    def init_device(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed import init_distributed_environment, initialize_model_parallel

        ranks = self.parallel_config.world_size
        torch.set_num_threads(1)
        with set_current_vllm_config(self.vllm_config):
            init_distributed_environment(
                ranks, self.rank, self.distributed_init_method, self.local_rank, "gloo"
            )
            initialize_model_parallel(ranks, 1)

    def load_model(self, **_: Any) -> None:
        multimodal = self.model_config.multimodal_config
        self.model = tiny_runner.Model(
            self.parallel_config.world_size, self.rank, multimodal.mm_encoder_tp_mode == "data"
        )
        kind = os.environ["FAILURES_RUNNER"]
        self.model_runner: Any = tiny_runner.make(kind, self.vllm_config, self.model)
        self.model_runner.block = BLOCK
        self.model_runner.kv = np.zeros(BLOCKS * BLOCK)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        shape = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
        return {"layer": FullAttentionSpec(block_size=BLOCK, **shape)}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["NHD"]

    def determine_available_memory(self) -> int:
        return BLOCKS * self.get_kv_cache_spec()["layer"].page_size_bytes

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        pass

    def compile_or_warm_up_model(self) -> worker_base.CompilationTimes:
        return worker_base.CompilationTimes(0.0, 0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def execute_model(self, scheduler_output: Any) -> Any:
        return self.model_runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        return self.model_runner.sample_tokens(grammar_output)

    # What the checks ask for over collective_rpc.

    def set_broken(self, broken: dict[float, list[int]]) -> None:
        self.model.broken = {value: set(ranks) for value, ranks in broken.items()}

    def seen(self) -> dict[str, Any]:
        cache = self.model_runner.encoder_cache
        rows = getattr(cache, "encoder_outputs", cache)
        return {"calls": self.model.calls, "rows": {k: float(v[0, 0]) for k, v in rows.items()}}
