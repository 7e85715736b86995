"""vLLM's multimodal classes for Vision-Exp: info, dummy inputs, processor.

One set of classes for all releases. What differs between them is bridged in two places:
`_apply_hf_processor_main` (its parameters and result) and `PromptUpdateDetails` (made by
`select_token_id`, whose callback differs inside).

A placeholder becomes a block of tokens (see layout.py). Its leading pads depend on the position and
are put in here, per request; everything that vLLM caches by the image's hash (patches, block
without pads, tower rows) is the same at every position. Only IMAGE tokens are embeds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing import (
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    ProcessorInputs,
    PromptReplacement,
    PromptUpdateDetails,
)
from vllm.multimodal.processing.processor import PlaceholderFeaturesInfo

from vision_exp import evidence
from vision_exp.chat.placement import place
from vision_exp.config import VisionConfig, VisionConfigError, read_config
from vision_exp.image.backend import warm_up
from vision_exp.image.transform import images_to_patches
from vision_exp.layout import (
    GROUP,
    IMAGE_ID,
    PLACEHOLDER_ID,
    SENTINEL_FIRST,
    Block,
    build_block,
    check_tokenizer,
)
from vision_exp.model.items import ImageParser, NormalizedImages, normalize_images
from vision_exp.model.options import lowered

_BUDGET = "max_n_token"


class VisionExpInfo(BaseProcessingInfo):
    """What vLLM asks about the checkpoint. Raises VisionConfigError for one it cannot serve."""

    def __init__(self, ctx: Any) -> None:
        super().__init__(ctx)
        self.vision = read_config(ctx.model_config.hf_config)
        check_tokenizer(ctx.tokenizer)
        try:
            self.budgeted({})
        except ValueError as error:
            raise VisionConfigError(f"--mm-processor-kwargs: {error}") from error

    def budgeted(self, kwargs: Mapping[str, Any]) -> VisionConfig:
        """The config that a request with these `mm_processor_kwargs` is processed by.

        The server's own count where the request does not say otherwise. ValueError as `lowered`.
        """
        return lowered(self.vision, self.ctx.get_merged_mm_kwargs(kwargs))

    @property
    def model_id(self) -> str:
        # Part of every image's hash: the same image gives other patches under another config.
        digest = hashlib.sha256(repr(self.vision).encode()).hexdigest()[:16]
        return f"{super().model_id}#vision-exp:{digest}"

    def get_data_parser(self) -> ImageParser:
        return ImageParser()

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """No limit of our own: --limit-mm-per-prompt is the only cap."""
        return {"image": None}

    def validate_num_items(self, modality: str, num_items: int) -> None:
        """As vLLM's, but naming the flag, which it leaves out where nothing else limits."""
        limit = self.allowed_mm_limits.get(modality)
        if limit is None:
            raise VLLMValidationError(
                f"this model takes images, not {modality}", parameter=modality
            )
        if num_items > limit:
            raise VLLMValidationError(
                f"At most {limit} {modality}(s) may be provided in one prompt. Set "
                "`--limit-mm-per-prompt` to increase this limit.",
                parameter=modality,
            )

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        """The longest block, leading pads included (not only its embeds): what must fit a step."""
        return {"image": self.vision.max_n_token}


class VisionExpProcessor(BaseMultiModalProcessor[VisionExpInfo]):
    """Turns images into patches and placeholders into blocks."""

    def __init__(self, info: VisionExpInfo, dummy_inputs: Any, **kwargs: Any) -> None:
        super().__init__(info, dummy_inputs, **kwargs)
        warm_up()  # now, at start-up: in a request it would cost seconds
        evidence.log_once("processor", info.ctx.model_config)

    def apply(self, inputs: ProcessorInputs, *args: Any, **kwargs: Any) -> Any:
        """Process one prompt. Raises VLLMValidationError or ValueError (HTTP 400) if it cannot."""
        items = inputs.mm_data_items
        images = items.get("image")
        if images is not None:
            uuids = inputs.mm_uuid_items or {}
            with _bad_requests("mm_processor_kwargs"):
                config = self.info.budgeted(inputs.hf_processor_mm_kwargs)
            images = normalize_images(images, uuids.get("image"), config)
            if self.cache is None:
                _check_known(images, [False] * len(images))
            lower = config.max_n_token < self.info.vision.max_n_token
            inputs = dataclasses.replace(
                inputs,
                mm_data_items=MultiModalDataItems({**items, "image": images}),
                # Without, vLLM up to 0.26 does not ask `get_item_for_hash`.
                mm_uuid_items={**uuids, "image": images.uuids},
                # Part of every hash, an uuid's too; so only what changes the patches.
                hf_processor_mm_kwargs={_BUDGET: config.max_n_token} if lower else {},
            )
        return super().apply(inputs, *args, **kwargs)

    def _get_cache_missing_items(self, cache: Any, mm_data_items: Any, mm_hashes: Any) -> Any:
        if (
            isinstance(images := mm_data_items.get("image"), NormalizedImages)
            and None in images.get_all()
        ):
            _check_known(images, cache.is_cached(mm_hashes["image"]))
        return super()._get_cache_missing_items(
            cache=cache, mm_data_items=mm_data_items, mm_hashes=mm_hashes
        )

    def _apply_hf_processor_main(self, **kwargs: Any) -> Any:  # type: ignore[override]
        features = self._features(kwargs["mm_items"], kwargs["hf_processor_mm_kwargs"])
        if "prompt" not in kwargs:
            return features  # 0.29 on: images only
        prompt = kwargs["prompt"]
        if isinstance(prompt, str):
            options = {"add_special_tokens": True, **kwargs["tokenization_kwargs"]}
            prompt = self.info.get_tokenizer().encode(prompt, **options)
        # (ids, features, whether placeholders were already replaced)
        return prompt, features, False

    def _features(
        self, mm_items: MultiModalDataItems, kwargs: Mapping[str, object]
    ) -> BatchFeature:
        images = mm_items.get("image")
        if images is None or not len(images):
            return BatchFeature({})
        config = self.info.vision
        if _BUDGET in kwargs:
            config = dataclasses.replace(config, max_n_token=kwargs[_BUDGET])
        with _bad_requests("image"):
            done = images_to_patches(images.get_all(), config)
        return BatchFeature(
            {
                "patches": _concatenate([one.patches for one in done]),
                "vit_grid": torch.tensor([one.vit_grid for one in done]),
                "llm_grid": torch.tensor([one.llm_grid for one in done]),
                # Copies: what vLLM does with one request's tensors must not reach the next one's.
                "perm": _concatenate([unpadded_block(*one.llm_grid).perm.clone() for one in done]),
            }
        )

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        if not hf_inputs:
            return {}
        # The grids stay on the host, where they are read as numbers.
        return {
            "patches": MultiModalFieldConfig.flat_from_sizes(
                "image", hf_inputs["vit_grid"].prod(-1)
            ),
            "vit_grid": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
            "llm_grid": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
            "perm": MultiModalFieldConfig.flat_from_sizes("image", hf_inputs["llm_grid"].prod(-1)),
        }

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: Any,
    ) -> Sequence[PromptReplacement]:
        images = out_mm_kwargs.get("image", [])

        def block(index: int) -> PromptUpdateDetails:
            height, width = images[index]["llm_grid"].data.tolist()
            return PromptUpdateDetails.select_token_id(unpadded_ids(height, width), IMAGE_ID)

        return [PromptReplacement(modality="image", target=[PLACEHOLDER_ID], replacement=block)]

    def _apply_prompt_updates(
        self, token_ids: list[int], mm_prompt_updates: Mapping[str, Sequence[Sequence[Any]]]
    ) -> tuple[list[int], Mapping[str, list[PlaceholderFeaturesInfo]]]:
        """Replace the k-th placeholder by the k-th image's block (see chat/placement.py).

        Not vLLM's own version: each block's length depends on where it starts, hence on the pads
        of the blocks before it.
        """
        updates = mm_prompt_updates.get("image", [])
        blocks = [list(update.content.full) for (update,) in updates]
        with _bad_requests("prompt"):
            out, placed = place(token_ids, blocks)
        features = [
            PlaceholderFeaturesInfo(
                modality="image",
                item_idx=index,
                start_idx=block.start,
                tokens=block.tokens,
                is_embed=torch.from_numpy(np.array(block.tokens) == IMAGE_ID),
            )
            for index, block in enumerate(placed)
        ]
        return out, {"image": features} if features else {}


@contextlib.contextmanager
def _bad_requests(parameter: str) -> Iterator[None]:
    """Turn a ValueError into what the server answers with HTTP 400 on every release."""
    try:
        yield
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter=parameter) from error


def _check_known(images: NormalizedImages, cached: Sequence[bool]) -> None:
    """Refuse an image that is an uuid alone and not in the cache."""
    for index, (image, uuid, known) in enumerate(
        zip(images.get_all(), images.uuids, cached, strict=True)
    ):
        if image is None and not known:
            raise VLLMValidationError(
                f"image {index} is only its uuid {uuid!r:.40}, under which this server has no "
                "image, or has none any more: send the image together with its uuid",
                parameter="image",
            )


def _concatenate(parts: list[torch.Tensor]) -> torch.Tensor:
    # torch.cat copies a single tensor as well: 1.3 ms for the patches of a 1036x588 image.
    return torch.cat(parts) if len(parts) > 1 else parts[0]


@lru_cache(maxsize=256)
def unpadded_block(height: int, width: int) -> Block:
    """The block of an LLM grid without leading pads, the same at every position. Do not modify."""
    return build_block((height, width), GROUP - 1)


@lru_cache(maxsize=256)
def unpadded_ids(height: int, width: int) -> list[int]:
    """Token ids of `unpadded_block`, from START to END. Do not modify."""
    return (unpadded_block(height, width).types.int() + SENTINEL_FIRST).tolist()
