"""What the checks share: tiny checkpoints on disk and objects of the running vLLM release."""

from __future__ import annotations

import random
from functools import cached_property
from pathlib import Path
from typing import Any

import tiny_config
import tiny_tokenizer
from PIL import Image

#: The token that stands for an image in a prompt.
PLACEHOLDER = 129264


class Rig:
    """Tiny checkpoints below `folder`, built when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def checkpoint(self, name: str, **overrides: Any) -> Path:
        """A Vision-Exp checkpoint (config and tokenizer) called `name`."""
        folder = self.folder / name
        if not folder.exists():
            tiny_tokenizer.write(tiny_config.write(folder, **overrides))
        return folder

    @cached_property
    def vision_folder(self) -> Path:
        return self.checkpoint("vision")

    def text_checkpoint(self, name: str, **overrides: Any) -> Path:
        """A text-only checkpoint called `name`."""
        folder = self.folder / name
        if not folder.exists():
            tiny_tokenizer.write(tiny_config.write_text_only(folder, **overrides))
        return folder

    @cached_property
    def text_folder(self) -> Path:
        return self.text_checkpoint("text")

    def model_config(self, folder: Path, **options: Any) -> Any:
        from vllm.config import ModelConfig

        options = {"max_model_len": 4096, "limit_mm_per_prompt": {"image": 32}, **options}
        return ModelConfig(model=str(folder), **options)

    @cached_property
    def vision_model_config(self) -> Any:
        return self.model_config(self.vision_folder)

    @cached_property
    def text_model_config(self) -> Any:
        return self.model_config(self.text_folder)

    def processor(self, cached: bool = False) -> Any:
        from vllm.multimodal import MULTIMODAL_REGISTRY
        from vllm.multimodal.cache import MultiModalProcessorOnlyCache

        config = self.vision_model_config
        cache = MultiModalProcessorOnlyCache(config) if cached else None
        return MULTIMODAL_REGISTRY.create_processor(config, cache=cache)

    def apply(
        self, processor: Any, prompt: Any, images: list[Any], uuids: Any = None, **kwargs: Any
    ) -> Any:
        """Process a prompt (ids, or text where the release takes it) with images.

        Keywords: the request's `mm_processor_kwargs`.
        """
        from vllm.multimodal.processing import ProcessorInputs
        from vllm.multimodal.processing.context import TimingContext

        items = processor.info.parse_mm_data({"image": images})
        inputs = ProcessorInputs(prompt, items, uuids, hf_processor_mm_kwargs=kwargs)
        return processor.apply(inputs, TimingContext(enabled=False))

    def hash_of(self, processor: Any, image: Any) -> str:
        """The name by which vLLM's caches know an image."""
        return self.apply(processor, [PLACEHOLDER], [image])["mm_hashes"]["image"][0]


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """An RGB image of random pixels."""
    return Image.frombytes(
        "RGB", (width, height), random.Random(seed).randbytes(3 * width * height)
    )
