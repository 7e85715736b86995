"""The vision model: what a Vision-Exp instance of `DeepseekV4ForCausalLM` has beyond the stock one.

`vision_class` makes a subclass of vLLM's class that keeps its name; only Vision-Exp configs get it.
Text-only checkpoints keep vLLM's class, of which nothing but `__init__` is wrapped (hooks.py).
"""

from __future__ import annotations

import logging
import types
from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from vision_exp.config import VisionConfigError, read_config
from vision_exp.engine import context
from vision_exp.layout import PLACEHOLDER, SENTINEL_FIRST, TokenType, image_token_mask
from vision_exp.model import memory, ranks
from vision_exp.model.encoder import encode_images, merge_rows
from vision_exp.model.weights import load_weights
from vision_exp.settings import TOWER_GRAPHS

logger = logging.getLogger("vllm.vision_exp")

LEARNED = ("image_start", "image_pad", "image_newline", "image_end")


def add_vision(model: Any, vllm_config: Any) -> None:
    """Build tower, aligner and learned vectors, unless this rank or configuration needs none."""
    from vllm.distributed import get_pp_group

    from vision_exp.tower import Aligner, VisionTower
    from vision_exp.tower.attention import available_flash
    from vision_exp.tower.parallel import VllmLinears

    config = read_config(vllm_config.model_config.hf_config)
    multimodal = vllm_config.model_config.multimodal_config
    if multimodal is None or multimodal.get_limit_per_prompt("image") == 0:
        model.tower_disabled_reason = "images are switched off"
        return
    if not get_pp_group().is_first_rank:
        model.tower_disabled_reason = "only the first pipeline rank embeds images"
        return
    if getattr(multimodal, "mm_encoder_only", False):
        raise VisionConfigError("--mm-encoder-only is not supported for this model")
    model.data_parallel = ranks.tower_mode(multimodal.mm_encoder_tp_mode).data_parallel
    linears = VllmLinears.for_config(config, data_parallel=model.data_parallel)
    with model._mark_tower_model(vllm_config, {"image"}):
        model.vision = VisionTower(config, linears)
        model.aligner = Aligner(config, linears)
    model.vision.flash = available_flash()  # vLLM's config is known here, and not when it runs
    for name in LEARNED:
        vector = nn.Parameter(torch.empty(config.hidden_size), requires_grad=False)
        setattr(model, name, vector)
    graphs = model.data_parallel or vllm_config.parallel_config.tensor_parallel_size == 1
    said = memory.line(
        [*model.vision.parameters(), *model.aligner.parameters()],
        vllm_config.scheduler_config.max_num_batched_tokens,
        config.hidden_size,
        graphs=graphs and TOWER_GRAPHS.is_on(),
    )
    logger.info("%s", said)


@cache
def vision_class(text_class: type) -> type:
    """The subclass of vLLM's `DeepseekV4ForCausalLM` for Vision-Exp, with its processor."""
    if issubclass(text_class, VisionExpMixin):
        return text_class
    from vllm.model_executor.models.interfaces import SupportsMultiModal
    from vllm.multimodal import MULTIMODAL_REGISTRY

    from vision_exp.model import dummy, processor

    names = {
        "__module__": text_class.__module__,
        "__qualname__": text_class.__qualname__,
        "__doc__": text_class.__doc__,
        "text_class": text_class,
    }
    bases = (VisionExpMixin, text_class, SupportsMultiModal)
    made = types.new_class(text_class.__name__, bases, exec_body=lambda body: body.update(names))
    return MULTIMODAL_REGISTRY.register_processor(
        processor.VisionExpProcessor,
        info=processor.VisionExpInfo,
        dummy_inputs=dummy.VisionExpDummyInputs,
    )(made)


class VisionExpMixin:
    """Methods and flags of the vision class. Without a tower, `tower_disabled_reason` is set."""

    supports_multimodal = True
    requires_raw_input_tokens = True  # routing needs the ids of image tokens
    supports_encoder_tp_data = True
    mm_prefix_clamp_sliding_window = True

    text_class: type
    image_start: nn.Parameter
    image_end: nn.Parameter
    image_newline: nn.Parameter
    image_pad: nn.Parameter
    tower_disabled_reason: str | None = None
    data_parallel: bool = False

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """The text of one image in a prompt. ValueError for other modalities."""
        if modality.startswith("image"):
            return PLACEHOLDER
        raise ValueError(f"this model takes images only, not {modality}")

    def get_language_model(self) -> Any:
        """The model itself: drafts look for `.model` and `.lm_head` on the result."""
        return self

    def embed_multimodal(self, **kwargs: Any) -> Sequence[torch.Tensor]:
        """Rows of each image's IMAGE tokens in prompt order, each (h * w, hidden).

        Keywords as in processor.py: `patches` (n, 3, p, p), `vit_grid` and `llm_grid`
        (images, 2) on the host, `perm` (rows,). No host synchronisation.
        """
        encode = partial(encode_images, self, data_parallel=self.data_parallel)
        failures = context.current().failures
        if failures is None:
            return encode(**kwargs)  # an error is fatal, as in stock vLLM
        return failures.encode(encode, kwargs, template=self.image_start)

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: Any = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Embeddings (tokens, hidden): words, learned vectors by id, tower rows by mask.

        Without a data-dependent branch, shape or synchronisation.
        """
        embeds = super().embed_input_ids(input_ids)  # type: ignore[misc]
        if self.tower_disabled_reason is None:
            embeds = self._put_learned(embeds, input_ids)
        if multimodal_embeddings is None or len(multimodal_embeddings) == 0:
            return embeds
        return merge_rows(embeds, multimodal_embeddings, is_multimodal)

    def _put_learned(self, embeds: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        """Learned vectors at image ids; IMAGE, in the middle, is overwritten by tower rows."""
        vectors = (self.image_start, self.image_pad, self.image_pad, self.image_newline)
        table = torch.stack((*vectors, self.image_end)).to(embeds.dtype)
        kinds = (input_ids - SENTINEL_FIRST).clamp(TokenType.START, TokenType.END)
        rows = table.index_select(0, kinds)
        return torch.where(image_token_mask(input_ids).unsqueeze(-1), rows, embeds)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint in any order; see weights.py for what goes where."""
        return load_weights(self, super().load_weights, weights)  # type: ignore[misc]
