"""When the tower fails on an image, that image's requests fail and the engine goes on.

vLLM takes any exception in a step for the end of the engine. Here, in the worker, a failed batch
is encoded again image by image. An image that fails alone has no rows, and neither has one whose
cached rows are not as many as its placeholders (two images under one uuid). Their requests are
given zeros, so that the step can finish, and the step's output names them for scheduler.py.

Every rank does the same. An error that not all tensor-parallel ranks meet in the same call stays
fatal, as does a CUDA error that the device does not recover from: ranks.py has the rules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from vision_exp.engine.failures import ranks, scheduler
from vision_exp.engine.failures.scheduler import AffectedRequest, FailedStep
from vision_exp.engine.spans import scheduled_ranges, span_of

logger = logging.getLogger("vllm.vision_exp")

Rows = dict[str, torch.Tensor]  # the runner's cache: identifier -> rows of one image
Features = Callable[[str], Sequence[Any]]  # request id -> its images
Encode = Callable[..., Sequence[torch.Tensor]]  # the model's encoder: inputs -> rows of each image


class Failures:
    """What one model runner knows about images without rows. Its state changes once per step."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}  # identifier -> why it has no rows
        self.template: torch.Tensor | None = None  # a row as the failed ones should have been
        self.encoding: list[str] = []  # images that the step encodes, in order
        self.step: Any = None  # SchedulerOutput of the step that runs
        self.affected: dict[str, AffectedRequest] = {}

    def begin(self, scheduler_output: Any, rows: Rows) -> None:
        """Start a step: the zeros of the last one go, and what the scheduler has forgotten."""
        for image in self.reasons:
            rows.pop(image, None)
        for image in scheduler_output.free_encoder_mm_hashes:
            self.reasons.pop(image, None)
        self.step, self.affected = scheduler_output, {}

    def will_encode(self, identifiers: Sequence[str], inputs: Sequence[tuple[str, Any]]) -> None:
        """Note the step's encoder inputs: identifiers, and (modality, input) of each."""
        self.encoding = [
            identifier
            for identifier, (modality, _) in zip(identifiers, inputs, strict=True)
            if modality == "image"
        ]

    def encode(
        self, encode: Encode, inputs: Mapping[str, Any], template: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """`encode(**inputs)`, with rows of zeros like `template` for images that fail alone.

        inputs: as in processor.py, with one row of `llm_grid` per image. Raises what `encode`
        raises where the step cannot go on (ranks.py), and in profiling runs.
        """
        count = len(inputs["llm_grid"])
        images, self.encoding = self.encoding[:count], self.encoding[count:]
        if len(images) < count:
            return encode(**inputs)  # a profiling run
        try:
            rows = _checked(encode(**inputs), inputs["llm_grid"])
        except Exception as error:  # noqa: BLE001 - whatever it is, it concerns these images alone
            ranks.recover(error, images)
            return [
                self._encode_alone(encode, image, one, template)
                for image, one in zip(images, split(inputs), strict=True)
            ]
        for image in images:
            self.reasons.pop(image, None)
        return rows

    def _encode_alone(
        self, encode: Encode, image: str, inputs: Mapping[str, Any], template: torch.Tensor
    ) -> torch.Tensor:
        try:
            (rows,) = _checked(encode(**inputs), inputs["llm_grid"])
        except Exception as error:
            ranks.recover(error, [image])
            logger.exception("[vision-exp] an image cannot be encoded; its requests fail")
            self.reasons[image] = f"an image cannot be encoded: {type(error).__name__}: {error}"
            self.template = template
            height, width = inputs["llm_grid"][0].tolist()
            return template.new_zeros((height * width, template.shape[-1]))
        self.reasons.pop(image, None)
        return rows

    @contextmanager
    def zero_fill(self, rows: Rows, features: Features) -> Iterator[None]:
        """Give rows of zeros to the step's images that have none or a wrong number of them."""
        # By id of the feature: in the engine's own process, samples of one prompt share features.
        substitutes: dict[int, tuple[Any, str, str]] = {}  # feature, its identifier, why
        for request, start, stop in scheduled_ranges(self.step):
            for feature in features(request):
                span = span_of(feature)
                if not span.overlaps(start, stop + 1):
                    continue  # drafts read one position further than the step computes
                if id(feature) not in substitutes:
                    reason = self._reason(feature, rows)
                    if reason is None:
                        continue
                    substitutes[id(feature)] = feature, feature.identifier, reason
                    template: Any = rows.get(feature.identifier, self.template)
                    count = feature.mm_position.get_num_embeds()
                    # Another request may have the right number of rows under the same name.
                    feature.identifier = f"zeros {len(substitutes)}: {feature.identifier}"
                    rows[feature.identifier] = template.new_zeros((count, template.shape[-1]))
                _, image, reason = substitutes[id(feature)]
                if span.start < stop:
                    self.affected.setdefault(request, AffectedRequest(image, span.start, reason))
        try:
            yield
        finally:
            for feature, image, _ in substitutes.values():
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
        if output is None or not self.affected:
            return output
        return scheduler.attach(output, FailedStep(self.affected, frozenset(self.reasons)))


def _checked(rows: Sequence[torch.Tensor], llm_grid: torch.Tensor) -> Sequence[torch.Tensor]:
    counts = [height * width for height, width in llm_grid.tolist()]
    found = [len(one) for one in rows]
    if found != counts:
        raise ValueError(f"the tower gave {found} rows for images of {counts}")
    return rows


def split(inputs: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The encoder's inputs for several images (see processor.py) as inputs for one each."""
    vit, llm = inputs["vit_grid"], inputs["llm_grid"]
    patches = inputs["patches"].split(vit.prod(-1).tolist())
    perm = inputs["perm"].split(llm.prod(-1).tolist())
    return [
        {**inputs, "patches": p, "perm": o, "vit_grid": v, "llm_grid": g}
        for p, o, v, g in zip(patches, perm, vit.split(1), llm.split(1), strict=True)
    ]
