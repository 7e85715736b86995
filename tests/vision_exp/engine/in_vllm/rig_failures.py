"""An engine for the checks of failing images: a release's scheduler, one worker, one process."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import rig_scheduling
import tiny_requests
import tiny_runner

tiny_runner.replace_language_model()
# Otherwise each engine gives the same prompts other hashes.
os.environ["PYTHONHASHSEED"] = "0"


@cache
def one_rank() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    store = Path(tempfile.mkdtemp(), "store")
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        initialize_model_parallel(1, 1)


class Engine:
    """A scheduler and one worker. `runner` is "v1" or "v2"."""

    def __init__(self, hf_config: Any, runner: str, *broken: float) -> None:
        one_rank()
        self.scheduler = rig_scheduling.build(hf_config, tokens=8192, caching=True)
        self.model = tiny_runner.Model()
        self.model.broken = {value: {0} for value in broken}
        self.worker = tiny_runner.make(runner, self.scheduler.vllm_config, self.model)
        self.worker.block = 256
        self.worker.kv = np.zeros(4000 * 256)
        self.reasons: dict[str, Any] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.hits: dict[str, int] = {}  # tokens that the prefix cache had for a request
        self.sent: list[bytes] = []  # the worker's outputs as they travel

    @property
    def rows(self) -> dict[str, Any]:
        cache = self.worker.encoder_cache
        return getattr(cache, "encoder_outputs", cache)

    def add(self, name: str, pictures: Sequence[float] = (), **options: Any) -> Any:
        made = tiny_requests.request(name, pictures, self.scheduler.hasher, **options)
        self.scheduler.add_request(made)
        return made

    def schedule(self) -> Any:
        output = self.scheduler.schedule()
        self.hits.update({n.req_id: n.num_computed_tokens for n in output.scheduled_new_reqs})
        return output

    def work(self, output: Any) -> Any:
        self.worker.execute_model(pickle.loads(pickle.dumps(output)))
        self.sent.append(pickle.dumps(self.worker.sample_tokens(None)))
        return pickle.loads(self.sent[-1])

    def update(self, output: Any, result: Any) -> None:
        for done in self.scheduler.update_from_output(output, result).values():
            for one in done.outputs:
                self.tokens.setdefault(one.request_id, []).extend(one.new_token_ids)
                if one.finish_reason is not None:
                    self.ends[one.request_id] = str(one.finish_reason)
                    self.reasons[one.request_id] = one.stop_reason

    def run(self) -> dict[str, str]:
        """Finish reason of every request, after at most 50 steps."""
        for _ in range(50):
            if not self.scheduler.has_unfinished_requests():
                return self.ends
            output = self.schedule()
            self.update(output, self.work(output))
        raise AssertionError(f"still running: {list(self.scheduler.requests)}")


def alone(hf_config: Any, runner: str, pictures: Sequence[float], **options: Any) -> list[int]:
    """The tokens of a request that has an engine to itself."""
    engine = Engine(hf_config, runner)
    engine.add("r", pictures, **options)
    assert engine.run() == {"r": "length"}
    return engine.tokens["r"]
