"""b12x (forks for GB10 and SM120): wider rows of window indices in a prefill with an image.

Its prefill (`support.b12x_prefill`) hands the kernel a matrix of cache slots with a length per row,
and a second one of compressed keys. It plans the kernel's scratch from the widths of both, so wider
rows need only be in the metadata. That scratch is reserved while vLLM profiles; nothing larger is
had later.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from vision_exp.visibility import sm120, spans
from vision_exp.visibility.spans import ImageVisibility

# b12x splits the keys of calls up to this many rows finely, and of larger ones hardly at all
# (_COMPRESSED_SPARSE_MLA_DECODE_SPLIT_MAX_ROWS, attention/_shared/mla/compressed_config.py, 1.5.1).
SPLIT_ROWS = 256


@dataclass(frozen=True)
class WideLayer:
    """`layer`, as the function that reserves scratch sees it: so many rows of so many keys."""

    layer: Any
    window_size: int
    max_num_batched_tokens: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


def wide_layers(layer: Any) -> tuple[WideLayer, WideLayer]:
    """What to reserve scratch for: all keys that an image row may have, most rows, and split ones.

    In a small `max_num_batched_tokens` the split rows need more than all rows at once.
    """
    tokens = layer.vllm_config.model_config.hf_config.vision_max_n_token
    width, rows = spans.widest(layer.window_size, tokens), layer.max_num_batched_tokens
    return WideLayer(layer, width, rows), WideLayer(layer, width, min(rows, SPLIT_ROWS))


def widened(visibility: ImageVisibility, swa_metadata: Any) -> Any:
    """A copy of `swa_metadata` whose prefill rows name all keys that they see; once per step.

    prefill_swa_indices: int32 (prefill rows, 1, width), cache slots, -1 where unused.
    prefill_swa_lens: int32 (prefill rows,), the used columns. Rows outside images are as before.
    """
    if "b12x" not in visibility.cache:
        slots, lens = sm120.slots(visibility, swa_metadata)
        causal = swa_metadata.prefill_swa_indices
        width = max(slots.shape[-1], causal.shape[-1])
        rows = torch.nn.functional.pad(causal, (0, width - causal.shape[-1]), value=-1)
        slots = torch.nn.functional.pad(slots, (0, width - slots.shape[-1]), value=-1)
        rows = rows.index_copy(0, visibility.rows, slots.view(-1, *rows.shape[1:]))
        counts = swa_metadata.prefill_swa_lens.index_copy(0, visibility.rows, lens)
        visibility.cache["b12x"] = dataclasses.replace(
            swa_metadata, prefill_swa_indices=rows, prefill_swa_lens=counts
        )
    return visibility.cache["b12x"]
