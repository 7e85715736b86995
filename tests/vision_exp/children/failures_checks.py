"""Checks that a failing image ends its requests and nothing else.

Real here: the release's scheduler, KV cache manager, requests and the code of both model runners
that lists a step's images. Stand-ins: the language model (one token for every request) and the
tower, which fails on chosen pictures.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import messages_rig as rig
import scheduling_child
import torch

from vision_exp import encoder_failures

BLOCK = 500  # tokens of the prompt for each picture


class Tower:
    """Raises for pictures whose value is in `broken`; refuses batches larger than `most`."""

    def __init__(self, broken: set[float], most: int = 99) -> None:
        self.broken, self.most, self.calls = broken, most, 0


def model(tower: Tower) -> Any:
    """An instance of the overlay's model mixin whose encoder is `tower`."""
    from vision_exp.model import VisionExpMixin

    made = object.__new__(VisionExpMixin)
    made.image_start = torch.zeros(8)
    made.spread_images = False

    def vision(patches: torch.Tensor, grid: Any) -> torch.Tensor:
        tower.calls += 1
        value = float(patches[0, 0, 0, 0])
        if value in tower.broken:
            raise RuntimeError(f"picture {value} broke the tower")
        return torch.full((1,), value)

    made.vision = vision
    made.aligner = lambda rows, grid: torch.full((4, 8), float(rows[0]))
    return made


def inputs(value: float) -> dict[str, torch.Tensor]:
    return {
        "patches": torch.full((16, 3, 14, 14), value),
        "vit_grid": torch.tensor([4, 4]),
        "llm_grid": torch.tensor([2, 2]),
        "perm": torch.arange(4, dtype=torch.int32),
    }


class Engine:
    """One process: scheduler and worker. `runner` is "v1" or "v2"."""

    def __init__(self, server: rig.Server, runner: str, tower: Tower) -> None:
        encoder_failures._failed.clear()
        hf_config = server.config.model_config.hf_config
        self.scheduler = scheduling_child.build(hf_config, tokens=8192, caching=True)
        self.model = model(tower)
        self.rows: dict[str, torch.Tensor] = {}
        self.features: dict[str, Any] = {}
        self.list_images = {"v1": self._v1, "v2": self._v2}[runner]
        self.outputs: dict[str, Any] = {}
        self.hits: dict[str, int] = {}  # tokens that the prefix cache had for a request

    def add(self, name: str, pictures: list[float], seed: int = 0) -> Any:
        places = [(5 + BLOCK * i, BLOCK - 10, str(value)) for i, value in enumerate(pictures)]
        length = 5 + BLOCK * len(pictures) + 20
        request = scheduling_child.request(self.scheduler, name, length, places, seed)
        for feature, value in zip(request.mm_features or (), pictures, strict=True):
            feature.data = inputs(value)
        self.features[name] = request.mm_features or []
        self.scheduler.add_request(request)
        return request

    def _v1(self, output: Any) -> Any:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        requests = {n: SimpleNamespace(mm_features=f) for n, f in self.features.items()}
        runner = SimpleNamespace(requests=requests)
        return GPUModelRunner._batch_mm_inputs_from_scheduler(runner, output)

    def _v2(self, output: Any) -> Any:
        from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner

        cache = SimpleNamespace(mm_features=self.features, encoder_outputs=self.rows)
        runner = SimpleNamespace(encoder_cache=cache)
        return EncoderRunner.prepare_mm_inputs(runner, output.scheduled_encoder_inputs)

    def step(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        output = self.scheduler.schedule()
        self.hits.update({n.req_id: n.num_computed_tokens for n in output.scheduled_new_reqs})
        for key in output.free_encoder_mm_hashes:
            self.rows.pop(key, None)
        keys, data = self.list_images(output)[:2]
        if keys:
            values = [one for _, one in data]
            batch = {
                name: (torch.cat if name in ("patches", "perm") else torch.stack)(
                    [value[name] for value in values]
                )
                for name in values[0]
            }
            self.rows.update(zip(keys, self.model.embed_multimodal(**batch), strict=True))
        names = list(output.num_scheduled_tokens)
        reqs = [self.scheduler.requests[name] for name in names]
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[7] if r.num_computed_tokens >= r.num_tokens else [] for r in reqs],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        for done in self.scheduler.update_from_output(output, result).values():
            for one in done.outputs:
                if one.finish_reason is not None:
                    self.outputs[one.request_id] = str(one.finish_reason)

    def run(self) -> dict[str, str]:
        """Finish reason of every request, after at most 50 steps."""
        for _ in range(50):
            if not self.scheduler.has_unfinished_requests():
                return self.outputs
            self.step()
        raise AssertionError(f"still running: {list(self.scheduler.requests)}")


def check_failing_image(server: rig.Server) -> None:
    for runner in ("v1", "v2"):
        tower = Tower({2.0})
        engine = Engine(server, runner, tower)
        engine.add("good", [1.0, 3.0])
        engine.add("bad", [4.0, 2.0], seed=1)
        engine.add("text", [], seed=2)
        assert engine.run() == {"good": "length", "bad": "error", "text": "length"}, runner
        assert float(engine.rows["1.0"][0, 0]) == 1.0
        # The zero rows are still cached, and so are the blocks of the prompt: neither is used.
        engine.add("again", [4.0, 2.0], seed=1)
        assert engine.run()["again"] == "error", runner
        # Once the picture can be encoded, it is.
        tower.broken.clear()
        engine.scheduler.encoder_cache_manager.reset()
        engine.rows.clear()
        engine.add("cured", [4.0, 2.0], seed=1)
        assert engine.run()["cured"] == "length", runner
        assert engine.hits["again"] == engine.hits["cured"] == 0, runner
        engine.add("hit", [4.0, 2.0], seed=1)
        assert engine.run()["hit"] == "length" and engine.hits["hit"] > 0, runner
        assert float(engine.rows["2.0"][0, 0]) == 2.0
        assert not encoder_failures._failed


def check_failing_batch(server: rig.Server) -> None:
    """A batch that fails as a whole is encoded image by image; all requests are answered."""
    engine = Engine(server, "v2", Tower(set()))
    stock = engine.model.embed_multimodal.__func__.__wrapped__
    sizes = []

    def crowded(self: Any, **kwargs: Any) -> Any:
        sizes.append(len(kwargs["llm_grid"]))
        if sizes[-1] > 1:
            raise torch.OutOfMemoryError("too many at once")
        return stock(self, **kwargs)

    engine.model.embed_multimodal = lambda **kwargs: encoder_failures._embed_multimodal(
        crowded, engine.model, **kwargs
    )
    engine.add("a", [1.0, 2.0])
    engine.add("b", [3.0], seed=1)
    assert engine.run() == {"a": "length", "b": "length"}
    assert sizes == [3, 1, 1, 1]
    assert [float(engine.rows[key][0, 0]) for key in ("1.0", "2.0", "3.0")] == [1.0, 2.0, 3.0]


def check_wrong_number_of_rows(server: rig.Server) -> None:
    engine = Engine(server, "v2", Tower(set()))
    engine.model.aligner = lambda rows, grid: torch.zeros((3 if rows[0] == 2 else 4, 8))
    # index_select would notice too few rows itself; too many would shift the next image's.
    engine.add("a", [1.0])
    engine.add("b", [2.0], seed=1)
    assert engine.run() == {"a": "length", "b": "error"}


def check_failures_elsewhere_stay_fatal(server: rig.Server) -> None:
    """In a worker process of its own, where ranks wait for each other, the exception is raised."""
    engine = Engine(server, "v1", Tower({1.0}))
    here = encoder_failures._scheduler_pid
    encoder_failures._scheduler_pid = os.getppid()
    try:
        engine.add("a", [1.0])
        engine.run()
    except RuntimeError as error:
        assert "broke the tower" in str(error)
    else:
        raise AssertionError("swallowed")
    finally:
        encoder_failures._scheduler_pid = here
