"""Random images, and the vision config of the tiny checkpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import tiny_config
from PIL import Image

from vision_exp.config import VisionConfig


def config(**overrides: Any) -> VisionConfig:
    return VisionConfig.from_hf_config(SimpleNamespace(**tiny_config.vision_config(**overrides)))


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """The same image for the same area."""
    bands = len(Image.new(mode, (1, 1)).getbands())
    data = np.random.default_rng(width * height).integers(0, 256, (height, width, bands), np.uint8)
    return Image.frombytes(mode, (width, height), data.tobytes())
