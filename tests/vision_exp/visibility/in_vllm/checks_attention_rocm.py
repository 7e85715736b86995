"""What ROCm's attention class writes with images in the batch. Not run on AMD hardware."""

from __future__ import annotations

from typing import Any

import rocm_stand_in
from checks_attention import KINDS, prefilled
from rig_visibility import built, metadata, new_builder, several

from vision_exp.visibility import spans


def rocm() -> dict[str, Any]:
    """ROCm's `_forward_prefill`, with the metadata of ROCm's own builder."""
    module = rocm_stand_in.modules()["rocm"]
    builder = new_builder(True, builder=module.DeepseekV4ROCMAiterSparseSWAMetadataBuilder)
    work, _ = built(several)
    meta = metadata(builder, work, images=True)
    attention = module.DeepseekV4ROCMAiterMLAAttention
    out = prefilled(module, attention, [(several, work, meta)], KINDS)
    out["metadata"] = type(meta).__name__
    plain = new_builder(False, builder=module.DeepseekV4ROCMAiterSparseSWAMetadataBuilder)
    out["text checkpoint"] = spans.get(metadata(plain, work, images=True)) is None
    return out
