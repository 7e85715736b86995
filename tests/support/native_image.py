"""The image functions of a released vLLM that serves the model itself, as a reference.

The module they lie in imports half of vLLM; these functions need only PIL, numpy and torch, so
they are taken out of its syntax tree and run alone, unchanged.
"""

from __future__ import annotations
import __future__

import ast
import math
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import sources
import torch
from PIL import Image, ImageOps

RELEASE = "0.33.0"
PARAMETERS = {
    "patch_size": 14,
    "downsample_ratio": 3,
    "max_n_token": 384,
    "min_pixels": 147456,
    "max_wh_ratio": 8,
}
_FUNCTIONS = {
    "grid_tokens",
    "solve_resize_ratio",
    "safe_resize",
    "load_image",
    "build_image_block",
}


@lru_cache(maxsize=1)
def functions(path: Path | None = None) -> SimpleNamespace:
    """load_image(image, **PARAMETERS), build_image_block(h, w, start) and what they call."""
    path = path or sources.stock(RELEASE) / "vllm/models/deepseek_v4/common/mm_preprocess.py"
    tree = ast.parse(path.read_text())
    constants = {"IMAGE_START", "IMAGE_PAD", "IMAGE", "IMAGE_NEW_LINE", "IMAGE_END"}
    constants.add("COMPRESS_PAD_TO")
    kept = [
        node
        for node in tree.body
        if (isinstance(node, ast.FunctionDef) and node.name in _FUNCTIONS)
        or (isinstance(node, ast.Assign) and _targets(node) & constants)
    ]
    found = {node.name for node in kept if isinstance(node, ast.FunctionDef)}
    if found != _FUNCTIONS:
        raise LookupError(f"{path} lacks {sorted(_FUNCTIONS - found)}")
    names = {"math": math, "np": np, "torch": torch, "Image": Image, "ImageOps": ImageOps}
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.Module(kept, []), str(path), "exec", flags), names)
    return SimpleNamespace(**names)


def _targets(node: ast.Assign) -> set[str]:
    return {name.id for target in node.targets for name in ast.walk(target) if hasattr(name, "id")}
