"""The VISION_EXP_* variables of a serving process: their names, what they may say, their defaults.

A variable is read when it is asked for, never at import. (The injected hook asks for
VISION_EXP_DISABLE=1 itself, and only for that spelling.) Standard library only, for the hooks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

_OFF = ("0", "false", "no", "off")


@dataclass(frozen=True)
class Switch:
    """Off at 0, false, no and off in any case, on at anything else; empty is as good as unset."""

    name: str
    default: bool

    def is_on(self) -> bool:
        value = os.environ.get(self.name, "").strip().lower()
        return value not in _OFF if value else self.default


@dataclass(frozen=True)
class Choice:
    """One of some words; the first where it is unset or empty."""

    name: str
    allowed: tuple[str, ...]

    def value(self) -> str:
        """Raises ValueError naming the variable, another value and what is allowed."""
        return self.checked(self.said())

    def said(self) -> str:
        """What the environment says, allowed or not."""
        return os.environ.get(self.name) or self.allowed[0]

    def checked(self, value: str) -> str:
        """The value itself; ValueError as of `value`."""
        if value not in self.allowed:
            raise ValueError(f"{self.name}={value!r}: expected one of {', '.join(self.allowed)}")
        return value


#: The overlay does nothing.
DISABLE = Switch("VISION_EXP_DISABLE", default=False)
#: No start where image tokens would not see each other.
REQUIRE_VISIBILITY = Switch("VISION_EXP_REQUIRE_VISIBILITY", default=False)
#: A worker tests at start-up that image rows reach every layer.
SELF_TEST = Switch("VISION_EXP_SELF_TEST", default=True)
#: Images are prepared by compiled loops.
FAST_PIXELS = Switch("VISION_EXP_FAST_PIXELS", default=True)
#: The tower runs in CUDA graphs.
TOWER_GRAPHS = Switch("VISION_EXP_TOWER_GRAPHS", default=True)
#: The tower's SwiGLU may run inside QuACK's matrix product.
TOWER_QUACK = Switch("VISION_EXP_TOWER_QUACK", default=True)
#: Whether tensor-parallel ranks share the tower (weights) or the images (data).
TOWER_MODE = Choice("VISION_EXP_TOWER_MODE", ("auto", "data", "weights"))
#: What becomes of images in tool messages.
TOOL_IMAGES = Choice("VISION_EXP_TOOL_IMAGES", ("refuse", "move", "note"))
#: What becomes of images over the limit of a request.
IMAGE_OVERFLOW = Choice("VISION_EXP_IMAGE_OVERFLOW", ("refuse", "keep-newest"))
#: What becomes of images of earlier turns that cannot be read (any more).
UNREADABLE_IMAGES = Choice("VISION_EXP_UNREADABLE_IMAGES", ("refuse", "note"))

#: `keep` leaves the checkpoint's value; anything else is as good as unset.
RMS_NORM_EPS = "VISION_EXP_RMS_NORM_EPS"


def keeps_eps() -> bool:
    """Whether the checkpoint's rms_norm_eps stays."""
    return os.environ.get(RMS_NORM_EPS) == "keep"
