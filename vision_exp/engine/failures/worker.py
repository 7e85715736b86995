"""When the tower fails on an image, that image's requests fail and the engine goes on.

vLLM takes any exception in a step for the end of the engine. Here, in the worker, a failed batch
is encoded again image by image. An image that fails alone has no rows, and neither has one whose
cached rows are not as many as its placeholders (two pictures under one uuid). Their requests are
lent zeros, so that the step can finish, and the step's output names them for failed_requests.py.

Every rank does the same. An error that not all tensor-parallel ranks meet in the same call stays
fatal, as does a CUDA error that the device does not recover from: failed_ranks.py has the rules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from vision_exp import patching
from vision_exp.engine import step
from vision_exp.engine.failures import client, ranks, scheduler
from vision_exp.engine.failures.scheduler import Failed, Reader

# What this needs of vLLM; `hotfix.py drift` looks for it in every release.
REQUIRES = (
    "vllm.v1.core.sched.output:SchedulerOutput.scheduled_new_reqs",
    "vllm.v1.core.sched.output:SchedulerOutput.scheduled_cached_reqs",
    "vllm.v1.core.sched.output:SchedulerOutput.num_scheduled_tokens",
    "vllm.v1.core.sched.output:SchedulerOutput.free_encoder_mm_hashes",
    "vllm.v1.core.sched.output:NewRequestData.req_id",
    "vllm.v1.core.sched.output:NewRequestData.num_computed_tokens",
    "vllm.v1.core.sched.output:CachedRequestData.req_ids",
    "vllm.v1.core.sched.output:CachedRequestData.num_computed_tokens",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model(scheduler_output)",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens(grammar_output)",
    "vllm.v1.worker.gpu_model_runner:"
    "GPUModelRunner._batch_mm_inputs_from_scheduler(scheduler_output)",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._gather_mm_embeddings(scheduler_output)",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.encoder_cache",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.requests",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.vllm_config",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model(scheduler_output)",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens(grammar_output)",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.encoder_cache",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.vllm_config",
    "vllm.v1.worker.gpu.mm.encoder_cache:EncoderCache.encoder_outputs",
    "vllm.v1.worker.gpu.mm.encoder_cache:EncoderCache.mm_features",
    "vllm.v1.worker.gpu.mm.encoder_runner:EncoderRunner.prepare_mm_inputs",
    "vllm.v1.worker.gpu.mm.encoder_runner:EncoderRunner.gather_mm_embeddings",
    "vllm.v1.worker.gpu.mm.encoder_runner:EncoderRunner.encoder_cache",
    "vllm.multimodal.inputs:MultiModalFeatureSpec.identifier",
    "vllm.multimodal.inputs:MultiModalFeatureSpec.mm_position",
    "vllm.multimodal.inputs:PlaceholderRange.offset",
    "vllm.multimodal.inputs:PlaceholderRange.length",
    "vllm.multimodal.inputs:PlaceholderRange.get_num_embeds",
)

logger = logging.getLogger("vllm.vision_exp")

Rows = dict[str, torch.Tensor]  # the runner's cache: identifier -> rows of one image
Features = Callable[[str], Sequence[Any]]  # request id -> its images


class Failures:
    """What one model runner knows about images without rows. Its state changes once per step."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}  # identifier -> why it has no rows
        self.like: torch.Tensor | None = None  # a row as the failed ones should have been
        self.encoding: list[str] = []  # images that the step encodes, in order
        self.step: Any = None  # SchedulerOutput of the step that runs
        self.readers: dict[str, Reader] = {}

    def begin(self, scheduler_output: Any, rows: Rows) -> None:
        """Start a step: the zeros of the last one go, and what the scheduler has forgotten."""
        for image in self.reasons:
            rows.pop(image, None)
        for image in scheduler_output.free_encoder_mm_hashes:
            self.reasons.pop(image, None)
        self.step, self.readers = scheduler_output, {}

    def next(self, count: int) -> list[str]:
        """Identifiers of the next `count` images of the step; fewer if it does not encode them."""
        taken, self.encoding = self.encoding[:count], self.encoding[count:]
        return taken

    @contextmanager
    def lend(self, rows: Rows, features: Features) -> Iterator[None]:
        """Give rows of zeros to the step's images that have none or a wrong number of them."""
        lent: dict[int, tuple[Any, str, str]] = {}  # by id: feature, its identifier, why
        for request, start, stop in _scheduled(self.step):
            for feature in features(request):
                place = feature.mm_position
                if place.offset > stop or place.offset + place.length <= start:
                    continue  # drafts read one position further than the step computes
                # In the engine's own process, the samples of one prompt share its features.
                if id(feature) not in lent:
                    reason = self._reason(feature, rows)
                    if reason is None:
                        continue
                    lent[id(feature)] = feature, feature.identifier, reason
                    like: Any = rows.get(feature.identifier, self.like)
                    zeros = like.new_zeros((place.get_num_embeds(), like.shape[-1]))
                    # Another request may have the right number of rows under the same name.
                    feature.identifier = f"lent {len(lent)}: {feature.identifier}"
                    rows[feature.identifier] = zeros
                _, image, reason = lent[id(feature)]
                if place.offset < stop:
                    self.readers.setdefault(request, Reader(image, place.offset, reason))
        try:
            yield
        finally:
            for feature, image, _ in lent.values():
                del rows[feature.identifier]
                feature.identifier = image

    def _reason(self, feature: Any, rows: Rows) -> str | None:
        found, wanted = rows.get(feature.identifier), feature.mm_position.get_num_embeds()
        if feature.identifier in self.reasons:
            return self.reasons[feature.identifier]
        if found is None or len(found) == wanted:
            return None  # what was never encoded is vLLM's to report
        return f"an image has {len(found)} rows for {wanted} placeholders"

    def report(self, output: Any) -> Any:
        """The output of the step, with the requests that failed in it if there are any."""
        if output is None or not self.readers:
            return output
        return scheduler.attach(output, Failed(self.readers, frozenset(self.reasons)))


_current: Failures | None = None  # of the runner whose step runs; None before the first


def install() -> None:
    """Wrap the scheduler, the API server's client, both model runners and the model's encoder."""
    scheduler.install()
    client.install()
    patching.when_imported("vllm.v1.worker.gpu_model_runner", _wrap_runner_v1)
    patching.when_imported("vllm.v1.worker.gpu.model_runner", _wrap_runner)
    patching.when_imported("vllm.v1.worker.gpu.mm.encoder_runner", _wrap_encoder_runner)
    patching.when_imported("vision_exp.model.model", _wrap_model)


def _wrap_runner_v1(module: ModuleType) -> None:
    _wrap_runner(module)
    patching.wrap(module.GPUModelRunner, "_batch_mm_inputs_from_scheduler", _remember_images)
    patching.wrap(module.GPUModelRunner, "_gather_mm_embeddings", _gather_v1)


def _wrap_runner(module: ModuleType) -> None:
    patching.wrap(module.GPUModelRunner, "execute_model", _execute_model)
    patching.wrap(module.GPUModelRunner, "sample_tokens", _sample_tokens)


def _wrap_encoder_runner(module: ModuleType) -> None:
    patching.wrap(module.EncoderRunner, "prepare_mm_inputs", _remember_images)
    patching.wrap(module.EncoderRunner, "gather_mm_embeddings", _gather_v2)


def _wrap_model(module: ModuleType) -> None:
    patching.wrap(module.VisionExpMixin, "embed_multimodal", _embed_multimodal)


def _execute_model(
    original: Any, runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any
) -> Any:
    global _current
    _current = _of(runner)
    if _current is None:
        return original(runner, scheduler_output, *args, **kwargs)
    cache = runner.encoder_cache
    _current.begin(scheduler_output, getattr(cache, "encoder_outputs", cache) or {})
    return _current.report(original(runner, scheduler_output, *args, **kwargs))


def _sample_tokens(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    output = original(runner, *args, **kwargs)
    return output if _current is None else _current.report(output)


def _of(runner: Any) -> Failures | None:
    if not hasattr(runner, "_vision_exp_failures"):
        isolated = ranks.isolated(runner.vllm_config)
        runner._vision_exp_failures = Failures() if isolated else None
    return runner._vision_exp_failures


def _remember_images(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    found = original(self, *args, **kwargs)
    if _current is not None:
        identifiers, inputs = found[:2]
        _current.encoding = [
            identifier
            for identifier, (modality, _) in zip(identifiers, inputs, strict=True)
            if modality == "image"
        ]
    return found


def _gather_v1(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    requests = runner.requests
    return _lending(
        runner.encoder_cache,
        lambda name: requests[name].mm_features,
        lambda: original(runner, *args, **kwargs),
    )


def _gather_v2(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    cache = runner.encoder_cache
    return _lending(
        cache.encoder_outputs,
        lambda name: cache.mm_features[name],
        lambda: original(runner, *args, **kwargs),
    )


def _lending(rows: Rows, features: Features, gather: Callable[[], Any]) -> Any:
    if _current is None or not step.current().has_image_rows:
        return gather()
    with _current.lend(rows, features):
        return gather()


def _scheduled(scheduler_output: Any) -> Iterator[tuple[str, int, int]]:
    """(request, start, stop): the prompt positions that a step computes."""
    starts = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
    cached = scheduler_output.scheduled_cached_reqs
    starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    for request, count in scheduler_output.num_scheduled_tokens.items():
        yield request, starts[request], starts[request] + count


def _embed_multimodal(original: Any, model: Any, **kwargs: Any) -> Sequence[torch.Tensor]:
    count = len(kwargs["llm_grid"])
    images = _current.next(count) if _current is not None else []
    if _current is None or len(images) < count:
        return original(model, **kwargs)  # errors are fatal here, or this is a profiling run
    try:
        rows = _checked(original(model, **kwargs), kwargs["llm_grid"])
    except Exception as error:  # noqa: BLE001 - whatever it is, it concerns these images alone
        ranks.recover(error, images)
        return [
            _encode_alone(original, model, image, one)
            for image, one in zip(images, split(kwargs), strict=True)
        ]
    for image in images:
        _current.reasons.pop(image, None)
    return rows


def _encode_alone(original: Any, model: Any, image: str, kwargs: Any) -> torch.Tensor:
    failures: Any = _current
    try:
        (rows,) = _checked(original(model, **kwargs), kwargs["llm_grid"])
    except Exception as error:
        ranks.recover(error, [image])
        logger.exception("[vision-exp] an image cannot be encoded; its requests fail")
        failures.reasons[image] = f"an image cannot be encoded: {type(error).__name__}: {error}"
        failures.like = model.image_start
        height, width = kwargs["llm_grid"][0].tolist()
        return model.image_start.new_zeros((height * width, model.image_start.shape[-1]))
    failures.reasons.pop(image, None)
    return rows


def _checked(rows: Sequence[torch.Tensor], llm_grid: torch.Tensor) -> Sequence[torch.Tensor]:
    counts = [height * width for height, width in llm_grid.tolist()]
    found = [len(one) for one in rows]
    if found != counts:
        raise ValueError(f"the tower gave {found} rows for images of {counts}")
    return rows


def split(kwargs: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The encoder's inputs for several images (see processor.py) as inputs for one each."""
    vit, llm = kwargs["vit_grid"], kwargs["llm_grid"]
    patches = kwargs["patches"].split(vit.prod(-1).tolist())
    perm = kwargs["perm"].split(llm.prod(-1).tolist())
    return [
        {**kwargs, "patches": p, "perm": o, "vit_grid": v, "llm_grid": g}
        for p, o, v, g in zip(patches, perm, vit.split(1), llm.split(1), strict=True)
    ]
