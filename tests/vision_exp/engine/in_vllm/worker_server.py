"""The worker of rig_server.py: worker_failures.py's, which also gives log-probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import tiny_runner
import torch
import worker_failures
from vllm.v1.outputs import LogprobsLists

tiny_runner.replace_language_model()


class Worker(worker_failures.Worker):
    """Its log-probabilities come from the same sum as its tokens: wrong rows give others."""

    def load_model(self, **options: Any) -> None:
        super().load_model(**options)
        stock = self.model.vision
        self.model.aligner = aligner
        self.model.vision = lambda patches, grids: stock(marks(patches, grids), grids)

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        if output is None or not output.req_ids:
            return output
        states = [self.model_runner.requests[name] for name in output.req_ids]
        if any(state.logprobs is not None for state in states):
            output.logprobs = logprobs(states, output.sampled_token_ids)
        return output

    def execute_dummy_batch(self) -> None:
        pass  # what an engine runs while another one has requests

    def reset_mm_cache(self) -> None:
        pass  # the runner's own is for profiling

    def reset_encoder_cache(self) -> None:
        self.model_runner.encoder_cache.clear()

    def left(self) -> list[str]:
        """Images that the worker still holds for failed."""
        failures = getattr(self.model_runner, "_vision_exp_failures", None)
        return sorted(failures.reasons) if failures is not None else []


def mark(patches: torch.Tensor) -> float:
    """By which the stand-in's tower tells images apart."""
    return round(float(patches.double().mean()), 4)


def marks(patches: torch.Tensor, grids: list[tuple[int, int]]) -> torch.Tensor:
    """Patches that hold nothing but their image's mark."""
    counts = [height * width for height, width in grids]
    return torch.cat(
        [
            torch.full((len(one), 1, 1, 1), mark(one), dtype=torch.double)
            for one in patches.split(counts)
        ]
    )


def aligner(values: list[float], grids: list[tuple[int, int]]) -> torch.Tensor:
    """As tiny_runner.Model's, for the checkpoint's downsample ratio."""
    rows = [-(-height // 3) * -(-width // 3) for height, width in grids]
    each = zip(values, rows, strict=True)
    return torch.cat([torch.full((count, tiny_runner.HIDDEN), value) for value, count in each])


def logprobs(states: list[Any], sampled: list[list[int]]) -> Any:
    """A row for each token that was sampled; the rest of the vocabulary is less likely."""
    wide = max(state.logprobs or 0 for state in states) + 1
    rows = [
        (token, state.sum)
        for state, tokens in zip(states, sampled, strict=True)
        for token in tokens
    ]
    tokens = np.array([[(t + i) % tiny_runner.VOCABULARY for i in range(wide)] for t, _ in rows])
    values = np.array([[-(total % 97) / 97 - i for i in range(wide)] for _, total in rows])
    starts = np.concatenate([[0], np.cumsum([len(one) for one in sampled])])
    shape = (len(rows), wide)
    return LogprobsLists(
        tokens.reshape(shape), values.reshape(shape), np.ones(len(rows)), starts.tolist()
    )
