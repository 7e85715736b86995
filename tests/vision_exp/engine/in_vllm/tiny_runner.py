"""A model runner that needs no GPU, for checks of failing images.

Real here: the code of both of vLLM's model runners that lists a step's images, encodes them, keeps
and gathers their rows; the overlay's encoder and merge. Stand-ins: the tower, which fails on chosen
pictures, and the language model. That writes a number per token into the slots of the KV cache that
the scheduler gave the request, and samples a token from the sum over all of the request's slots, so
a wrong row, a wrong block or a stale one gives another token.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
)
from vllm.v1.worker.gpu import model_runner as v2
from vllm.v1.worker.gpu.mm import encoder_runner
from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

from vision_exp.model.model import VisionExpMixin

HIDDEN = 8
VOCABULARY = 1000
IMAGE = 129259  # sentinel id of an IMAGE token
RUNNERS = {"v1": RunnerV1, "v2": v2.GPUModelRunner}


class Text(torch.nn.Module):
    """A language model's embeddings: exact numbers that tell tokens apart."""

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return (input_ids % 97 + 1).to(torch.float32).unsqueeze(-1).repeat(1, HIDDEN)


class Model(VisionExpMixin, Text):
    """The overlay's model methods over a tower that is told what to fail on."""

    def __init__(self, ranks: int = 1, rank: int = 0, spread: bool = False) -> None:
        super().__init__()
        for name in ("image_start", "image_pad", "image_newline", "image_end"):
            vector = torch.nn.Parameter(torch.full((HIDDEN,), 0.5), requires_grad=False)
            setattr(self, name, vector)
        self.config = SimpleNamespace(hidden_size=HIDDEN)
        self.ranks, self.rank, self.data_parallel = ranks, rank, spread
        self.broken: dict[float, set[int]] = {}  # picture -> ranks on which it fails
        self.most = 99  # pictures in one call
        self.calls: list[list[float]] = []

    def vision(self, patches: torch.Tensor, grids: list[tuple[int, int]]) -> list[float]:
        values = [float(one[0, 0, 0, 0]) for one in patches.split([h * w for h, w in grids])]
        self.calls.append(values)
        self._meet()
        for value in values:
            if self.rank in self.broken.get(value, ()):
                raise RuntimeError(f"picture {value} broke the tower")
        if len(values) > self.most:
            raise torch.OutOfMemoryError("too many at once")
        self._meet()
        return values

    def aligner(self, values: list[float], grids: list[tuple[int, int]]) -> torch.Tensor:
        return torch.cat(
            [torch.full((h * w // 4, HIDDEN), v) for v, (h, w) in zip(values, grids, strict=True)]
        )

    def _meet(self) -> None:
        """The sum over ranks that ends each half block of a shared tower."""
        if self.ranks > 1 and not self.data_parallel:
            from vllm.distributed import tensor_model_parallel_all_reduce

            assert float(tensor_model_parallel_all_reduce(torch.ones(1))) == self.ranks


class Off:
    """Whatever else a runner has: switched off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return None


class Later(AsyncModelRunnerOutput):
    """An output that another thread fetches, as under asynchronous scheduling."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self.output = output

    def get_output(self) -> ModelRunnerOutput:
        return self.output


def make(kind: str, vllm_config: Any, model: Model) -> Any:
    """A runner of vLLM's class for `kind`, "v1" or "v2", with a stand-in language model."""
    made: Any = object.__new__(type("Runner", (RUNNERS[kind], Off), {}))
    made.vllm_config, made.model_config = vllm_config, vllm_config.model_config
    made.model, made.device, made.kind = model, torch.device("cpu"), kind
    made.requests, made.input_batch = {}, SimpleNamespace(req_ids=[])
    made.kv, made.block = np.zeros(0), 0
    made.encoder_cache = {} if kind == "v1" else EncoderCache()
    if kind == "v2":
        made.encoder_runner = EncoderRunner(
            model=model,
            max_num_tokens=8192,
            hidden_size=HIDDEN,
            encoder_cache=made.encoder_cache,
            dtype=torch.float32,
            device=made.device,
        )
    return made


def replace_language_model() -> None:
    """What only a GPU can do, in vLLM's runner classes; must come before the overlay wraps them."""
    batches = encoder_runner.group_and_batch_mm_kwargs
    encoder_runner.group_and_batch_mm_kwargs = lambda *args, **kwargs: batches(
        *args, **{**kwargs, "pin_memory": False}
    )
    for runner in RUNNERS.values():
        runner.execute_model = _execute_model  # type: ignore[method-assign,assignment]
        runner.sample_tokens = _sample_tokens  # type: ignore[method-assign,assignment]


def _execute_model(runner: Any, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
    runner.sampled = None
    _update(runner, scheduler_output)
    step = scheduler_output.num_scheduled_tokens
    if not step:
        return EMPTY_MODEL_RUNNER_OUTPUT
    names = runner.input_batch.req_ids = list(step)
    states = [runner.requests[name] for name in names]
    counts = np.array([step[name] for name in names], dtype=np.int32)
    starts = np.array([state.num_computed_tokens for state in states], dtype=np.int32)
    ids = [
        token
        for state, start, count in zip(states, starts, counts, strict=True)
        for token in state.tokens[start : start + count]
    ]
    if runner.kind == "v1":
        runner._execute_mm_encoder(scheduler_output)
        rows, mask = runner._gather_mm_embeddings(scheduler_output)
    else:
        encoder = runner.encoder_runner
        keys, inputs = encoder.prepare_mm_inputs(scheduler_output.scheduled_encoder_inputs)
        if inputs:
            runner.encoder_cache.encoder_outputs.update(
                zip(keys, encoder.execute_mm_encoder(inputs), strict=True)
            )
        rows, mask = encoder.gather_mm_embeddings(
            names,
            int(counts.sum()),
            counts,
            np.concatenate([[0], np.cumsum(counts)]),
            np.array([state.prompt for state in states], dtype=np.int32),
            starts,
        )
    hidden = runner.model.embed_input_ids(torch.tensor(ids), rows, is_multimodal=mask)
    values = hidden.double().sum(-1).split(counts.tolist())
    runner.sampled = [_decode(runner, *one) for one in zip(states, starts, values, strict=True)]
    return None  # sample_tokens has the output


def _update(runner: Any, scheduler_output: Any) -> None:
    cache = runner.encoder_cache
    rows = cache if runner.kind == "v1" else cache.encoder_outputs
    for key in scheduler_output.free_encoder_mm_hashes:
        rows.pop(key, None)
    for name in scheduler_output.finished_req_ids:
        runner.requests.pop(name, None)
        if runner.kind == "v2":
            cache.remove_request(name)
    for new in scheduler_output.scheduled_new_reqs:
        runner.requests[new.req_id] = SimpleNamespace(
            tokens=list(new.prompt_token_ids),
            prompt=len(new.prompt_token_ids),
            mm_features=new.mm_features,
            num_computed_tokens=new.num_computed_tokens,
            blocks=list(new.block_ids[0]),
            logprobs=new.sampling_params.logprobs,
        )
        if runner.kind == "v2":
            cache.add_request(new.req_id, new.mm_features)
    cached = scheduler_output.scheduled_cached_reqs
    for name, computed, blocks in zip(
        cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
    ):
        state = runner.requests[name]
        state.num_computed_tokens = computed
        fresh = list(blocks[0]) if blocks else []
        resumed = name in cached.resumed_req_ids
        state.blocks = fresh if resumed else state.blocks + fresh


def _decode(runner: Any, state: Any, start: int, values: torch.Tensor) -> list[int]:
    """Write the step's KV; a token once the whole prompt is there."""
    stop = int(start) + len(values)
    slots = [state.blocks[p // runner.block] * runner.block + p % runner.block for p in range(stop)]
    runner.kv[slots[start:]] = values.numpy()
    if stop < state.prompt:
        return []
    places = np.arange(1, stop + 1)
    state.sum = float((runner.kv[slots] * places).sum())
    token = int(round(state.sum * 8)) % VOCABULARY
    del state.tokens[stop:]
    state.tokens.append(token)
    return [token]


def _sample_tokens(runner: Any, grammar_output: Any) -> Any:
    if runner.sampled is None:
        return None  # as vLLM's V2 runner, when the step has failed
    names = runner.input_batch.req_ids
    output = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=runner.sampled,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
    later = runner.vllm_config.scheduler_config.async_scheduling
    return Later(output) if later else output
