"""The VISION_EXP_* variables of a serving process: their names, what they may say, what they mean.

A variable is read when its function is called, never at import. A switch is off at 0, false, no and
off, in any case, and on at anything else; empty is as good as unset. (Of VISION_EXP_DISABLE the
injected hook knows `1` alone, which spares it the overlay; other spellings are seen here.) Standard
library only, for the hooks.
"""

from __future__ import annotations

import os

DISABLE = "VISION_EXP_DISABLE"
RMS_NORM_EPS = "VISION_EXP_RMS_NORM_EPS"
REQUIRE_VISIBILITY = "VISION_EXP_REQUIRE_VISIBILITY"
TOOL_IMAGES = "VISION_EXP_TOOL_IMAGES"
IMAGE_OVERFLOW = "VISION_EXP_IMAGE_OVERFLOW"
FAST_PIXELS = "VISION_EXP_FAST_PIXELS"
TOWER_GRAPHS = "VISION_EXP_TOWER_GRAPHS"
TOWER_QUACK = "VISION_EXP_TOWER_QUACK"

_OFF = ("0", "false", "no", "off")


def disabled() -> bool:
    """Whether the overlay is to do nothing. Default: no."""
    return _is_on(DISABLE, default=False)


def keeps_eps() -> bool:
    """Whether the checkpoint's rms_norm_eps stays (`keep`). Default: no, it is replaced."""
    return os.environ.get(RMS_NORM_EPS) == "keep"


def requires_visibility() -> bool:
    """Whether to refuse to start where image tokens would not see each other. Default: no."""
    return _is_on(REQUIRE_VISIBILITY, default=False)


def tool_images() -> str:
    """What becomes of images in tool messages: `refuse` (default), `move` or `note`.

    Raises ValueError naming another value.
    """
    return _choice(TOOL_IMAGES, ("refuse", "move", "note"))


def image_overflow() -> str:
    """What becomes of images over the limit: `refuse` (default) or `keep-newest`.

    Raises ValueError naming another value.
    """
    return _choice(IMAGE_OVERFLOW, ("refuse", "keep-newest"))


def fast_pixels() -> bool:
    """Whether images are prepared by compiled loops. Default: yes."""
    return _is_on(FAST_PIXELS, default=True)


def tower_graphs() -> bool:
    """Whether the tower runs in CUDA graphs. Default: yes."""
    return _is_on(TOWER_GRAPHS, default=True)


def tower_quack() -> bool:
    """Whether the tower's SwiGLU may run inside QuACK's matrix product. Default: yes."""
    return _is_on(TOWER_QUACK, default=True)


def _is_on(variable: str, *, default: bool) -> bool:
    value = os.environ.get(variable, "").strip()
    return value.lower() not in _OFF if value else default


def _choice(variable: str, allowed: tuple[str, ...]) -> str:
    value = os.environ.get(variable) or allowed[0]
    if value not in allowed:
        raise ValueError(f"{variable}={value!r}: expected one of {', '.join(allowed)}")
    return value
