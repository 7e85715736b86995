"""What `mm_processor_kwargs` may ask for, of a request or of a server: fewer tokens for an image.

Nothing else is obeyed, so nothing else is taken: vLLM passes on whatever a client sends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vision_exp.config import MIN_BUDGET, VisionConfig

MAX_PIXELS = "max_pixels"
#: Where Hugging Face processors look for the options of images; the same to us.
_NESTED = "images_kwargs"


def lowered(config: VisionConfig, kwargs: Mapping[str, Any]) -> VisionConfig:
    """The config with the token budget of one image that `mm_processor_kwargs` ask for.

    `max_pixels`: most pixels of a resized image. A token of the grid covers (`patch_size` *
    `downsample_ratio`)² of them, 42 x 42 here, so the budget becomes `max_pixels` over that, and
    never more than the checkpoint's. Raises ValueError that names what is not known or too small.
    """
    flat = dict(kwargs)
    nested = flat.pop(_NESTED, None) or {}
    if not isinstance(nested, Mapping):
        raise ValueError(f"mm_processor_kwargs: {_NESTED} must be an object, got {nested!r:.20}")
    flat = {key: value for key, value in {**flat, **nested}.items() if value is not None}
    most = flat.pop(MAX_PIXELS, None)
    if flat:
        raise ValueError(
            f"mm_processor_kwargs: this model has no option {', '.join(map(repr, sorted(flat)))}. "
            f"{MAX_PIXELS!r} gives an image fewer tokens; nothing else can be set"
        )
    if most is None:
        return config
    cell = (config.patch_size * config.downsample_ratio) ** 2
    if not isinstance(most, int) or isinstance(most, bool) or most < MIN_BUDGET * cell:
        raise ValueError(
            f"mm_processor_kwargs: {MAX_PIXELS} must be a whole number of at least "
            f"{MIN_BUDGET * cell} ({MIN_BUDGET} tokens of {cell} pixels), got {most!r:.20}"
        )
    return dataclasses.replace(config, max_n_token=min(config.max_n_token, most // cell))
